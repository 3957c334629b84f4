"""A save interrupted by a death or a full disk leaves the checkpoint before it intact, or is complete."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import attrs
import torch

from nanotrain_core.contracts import Block, Checkpoint, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.disaster import Outcome, no_space, save_and_die, save_and_lose
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import make_run, rank
from nanotrain_core.testing.saving import (
    ADAMW,
    numbered,
    open_state,
    save,
    state_of,
    temporary_folder,
    wait_for_all,
)


@check("checkpoint", since="0.1", variants=("killed", "out_of_space"))
def interrupted_save_leaves_the_last(case: Case, disaster: str) -> None:
    """Killed at any write, or out of space, a save leaves step 1 loadable, or is complete.

    A full disk is a CheckpointError. What is loaded then is bitwise step 1 or step 2, never a mixture.
    """
    alone = case.alone()
    with temporary_folder() as folder:
        outcomes = run_ranks(save_and_die, 1, alone, folder, disaster, backend=None)[0]
        assert_survived(alone, outcomes, disaster)
    assert len(outcomes) > 1, "no write was found to interrupt"


@check("checkpoint", since="0.2", applies=distributed, variants=("first", "last"))
def killed_rank_leaves_the_last(case: Case, victim: str) -> None:
    """With one of several ranks killed at any write, step 1 stays loadable, or 2 is complete.

    It is complete if any rank took it for that. What is loaded is bitwise step 1 or step 2, on one process.
    """
    number = 0 if victim == "first" else case.world_size - 1
    with temporary_folder() as folder:
        outcomes = run_ranks(save_and_lose, 1, case, folder, number, backend=None, timeout=170.0)[0]
        assert_survived(case.alone(), outcomes, "killed")
    assert any(outcome.announced for outcome in outcomes), "no save was ever complete"


@check("checkpoint", since="0.2")
def full_disk_on_one_rank(case: Case) -> None:
    """A rank without space fails the save on all ranks and leaves nothing, or on none and it is complete."""
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


@attrs.define(frozen=True)
class Survivor:
    """The folder that an interrupted save left behind, as a new process finds it."""

    broken: dict[int, list[str]]
    """What is wrong with each checkpoint that is not whole, by step."""
    error: str
    """Of loading the latest, empty if there was none."""
    step: int | None
    """Of what was loaded; None: there was nothing."""
    differing: list[str]
    """Tensors that are not what that step saved."""


def survivors(case: Case, folders: Sequence[Path]) -> list[Survivor]:
    """Look at each folder with a checkpoint component of its own, and load the latest into one run."""
    run = make_run(case, {"optimizer": ADAMW})
    return [_survivor(case.build(), run.mesh, folder, state_of(run)) for folder in folders]


def _survivor(checkpoint: Checkpoint, mesh: Mesh, folder: Path, state: TrainState) -> Survivor:
    for block in state.blocks:
        block.tensor.fill_(-1.0)
    try:
        checkpoint.open(folder, mesh)
        problems = {step: list(checkpoint.verify(step)) for step in checkpoint.steps()}
        back = checkpoint.load("latest", state)
    except Exception as error:
        return Survivor({}, f"{type(error).__name__}: {error}", None, [])
    step = None if back is None else back.meta["step"]
    differing = [] if step is None else [b.name for b in state.blocks if not torch.equal(*_both(b, step))]
    return Survivor({step: found for step, found in problems.items() if found}, "", step, differing)


def _both(block: Block, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a whole tensor, and what :func:`numbered` made of it at ``step``."""
    wanted = torch.randn(block.global_shape, generator=torch.Generator().manual_seed(step))
    return block.tensor, wanted.to(block.tensor.dtype)


def assert_survived(case: Case, outcomes: Sequence[Outcome], disaster: str) -> None:
    """Check what interrupted saves left behind, in one process."""
    folders = [outcome.folder for outcome in outcomes]
    found: list[Survivor] = run_ranks(survivors, 1, case, folders, backend=None)[0]
    for outcome, left in zip(outcomes, found, strict=True):
        at = f"{disaster} {outcome.point}"
        assert not outcome.error, f"{at}: {outcome.error}"
        assert not left.error, f"{at}: 'latest' cannot be loaded: {left.error}"
        assert not left.broken, f"{at}: there is a checkpoint that is not whole: {left.broken}"
        assert left.step is not None, f"{at}: no checkpoint is left"
        possible = (2,) if outcome.announced else (1, 2)
        assert left.step in possible, f"{at}: step {left.step} came back, expected one of {possible}"
        assert not left.differing, f"{at}: {left.differing} are not what step {left.step} saved"
