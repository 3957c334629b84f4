"""A save that is interrupted, by a death or a full disk, leaves the checkpoint before it or is complete."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import torch

from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.disaster import Outcome, no_space, save_and_die, save_and_lose
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank
from nanotrain_core.testing.saving import load, numbered, open_state, save, temporary_folder, wait_for_all


@check("checkpoint", since="0.1", variants=("killed", "out_of_space"))
def interrupted_save_leaves_the_last(case: Case, disaster: str) -> None:
    """Killed before or after any write, or out of space, a save leaves step 1 loadable, or is complete.

    A full disk is a CheckpointError. What is loaded then is bitwise step 1 or step 2, never a mixture.
    """
    alone = case.alone()
    with temporary_folder() as folder:
        outcomes = run_ranks(save_and_die, 1, alone, folder, disaster, backend=None)[0]
        for outcome in outcomes:
            assert_survived(alone, outcome, disaster)
            shutil.rmtree(outcome.folder)
    assert len(outcomes) > 1, "no write was found to interrupt"


@check("checkpoint", since="0.2", applies=distributed, variants=("first", "last"))
def killed_rank_leaves_the_last(case: Case, victim: str) -> None:
    """With one of several ranks killed before or after any write, step 1 stays loadable, or 2 is complete.

    It is complete if any rank took it for that. What is loaded is bitwise step 1 or step 2, on one process.
    """
    number = 0 if victim == "first" else case.world_size - 1
    with temporary_folder() as folder:
        outcomes = run_ranks(save_and_lose, 1, case, folder, number, backend=None, timeout=170.0)[0]
        for outcome in outcomes:
            assert_survived(case.alone(), outcome, "killed")
            shutil.rmtree(outcome.folder)
    assert outcomes[-1].announced, "no save was ever complete"


@check("checkpoint", since="0.2")
def full_disk_on_one_rank(case: Case) -> None:
    """A rank without space fails the save on all ranks, and nothing is left, or on none, and it is there."""
    for rank_of_fault in range(case.world_size):
        with temporary_folder() as folder:
            results = run_ranks(save_in_little_space, case.world_size, case, folder, rank_of_fault)
        errors = [error for error, _, _ in results]
        who = f"rank {rank_of_fault} has a full disk"
        assert all(errors) or not any(errors), f"{who}: errors of the ranks {errors}"
        assert results[0][1] == [], f"{who}: the failed save left {results[0][1]}"
        steps = results[0][2]
        assert steps[-1] == 3, f"{who}: steps after the next save {steps}"
        assert all(errors) or 2 in steps, f"{who}: no rank had an error, yet step 2 is not among {steps}"


def save_in_little_space(case: Case, folder: Path, rank_of_fault: int) -> tuple[str, list[str], list[int]]:
    """Save step 2 while one rank cannot write, then step 3; return the error, what was left, all steps."""
    checkpoint, state = open_state(case, folder)
    save(checkpoint, 1, numbered(state, 1))
    before, error = set(folder.rglob("*")), ""
    with no_space() if rank() == rank_of_fault else nullcontext():
        try:
            save(checkpoint, 2, numbered(state, 2))
        except CheckpointError as problem:
            error = str(problem)
    wait_for_all()
    left = sorted(str(path) for path in set(folder.rglob("*")) - before) if error else []
    wait_for_all()
    save(checkpoint, 3, numbered(state, 3))
    return error, left, list(checkpoint.steps())


def broken_steps(case: Case, folder: Path) -> dict[int, list[str]]:
    """Return what is wrong with each checkpoint that is there."""
    checkpoint, _ = open_state(case, folder)
    problems = {step: list(checkpoint.verify(step)) for step in checkpoint.steps()}
    return {step: found for step, found in problems.items() if found}


def assert_survived(case: Case, outcome: Outcome, disaster: str) -> None:
    """Check what an interrupted save left behind."""
    assert not outcome.error, f"{disaster} {outcome.point}: {outcome.error}"
    (broken,) = run_ranks(broken_steps, 1, case, outcome.folder, backend=None)
    assert not broken, f"{disaster} {outcome.point}: there is a checkpoint that is not whole: {broken}"
    (back,) = run_ranks(load, 1, case, outcome.folder, "latest", backend=None)
    assert back is not None, f"{disaster} {outcome.point}: no checkpoint is left"
    step, possible = back.meta["step"], (2,) if outcome.announced else (1, 2)
    assert step in possible, f"{disaster} {outcome.point}: step {step} came back, expected one of {possible}"
    for block in back.blocks:
        wanted = torch.randn(block.global_shape, generator=torch.Generator().manual_seed(step))
        same = torch.equal(block.tensor, wanted.to(block.tensor.dtype))
        assert same, f"{disaster} {outcome.point}: {block.name} is not what step {step} saved"
