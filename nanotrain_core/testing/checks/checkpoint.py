"""A checkpoint is complete or absent, gives back every bit, and notices damage before it touches a run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.contracts import Block, Checkpoint, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.disaster import Outcome, no_space, save_and_die
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import make_run, rank, train

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}
Changes = dict[str, Any]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# --- run on ranks -----------------------------------------------------------------------------------


def open_state(case: Case, folder: Path, *, fill: float | None = None) -> tuple[Checkpoint, TrainState]:
    """Return the case's checkpoint, opened on ``folder``, and the state of a freshly composed run.

    Args:
        fill: overwrite every tensor with this value.
    """
    run = make_run(case, {"optimizer": ADAMW})
    assert run.checkpoint is not None
    run.checkpoint.open(folder, run.mesh)
    blocks = [Block.of("", p.parameter.detach(), p.placement) for p in run.placed]
    blocks += run.optimizer.blocks()
    if fill is not None:
        for block in blocks:
            block.tensor.fill_(fill)
    streams = {"torch": torch.get_rng_state()}
    return run.checkpoint, TrainState(blocks, {"step": 0, "text": "ünïcode", "list": [1, 2.5]}, streams)


def numbered(state: TrainState, seed: int) -> TrainState:
    """Fill every tensor with numbers that depend on its name and place, and write ``seed`` in the meta."""
    for block in state.blocks:
        whole_tensor = torch.randn(block.global_shape, generator=torch.Generator().manual_seed(seed))
        index = tuple(slice(o, o + n) for o, n in zip(block.offset, block.tensor.shape, strict=True))
        block.tensor.copy_(whole_tensor[index])
    return attrs.evolve(state, meta={**state.meta, "step": seed})


def save(checkpoint: Checkpoint, step: int, state: TrainState) -> None:
    """Save to the end: without waiting, files may still be written when this returns."""
    checkpoint.save(step, state)
    checkpoint.advance(wait=True)


def save_steps(case: Case, folder: Path, steps: list[int]) -> list[Block]:
    """Save a different state at each of ``steps`` and return the blocks of the last."""
    checkpoint, state = open_state(case, folder)
    for step in steps:
        save(checkpoint, step, numbered(state, step))
    return list(state.blocks)


@attrs.define(frozen=True, eq=False)
class Loaded:
    """What a rank got back."""

    blocks: list[Block]
    meta: dict[str, Any]
    streams: dict[str, torch.Tensor]


def load(case: Case, folder: Path, which: str, copy_to: Path | None = None) -> Loaded | None:
    """Load into a run full of other numbers; save what was loaded again in ``copy_to``."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    found = checkpoint.load(which, state)
    if found is not None and copy_to is not None:
        checkpoint.open(copy_to, make_run(case, {}).mesh)
        again = attrs.evolve(state, meta=found.meta, rank_tensors=found.rank_tensors)
        save(checkpoint, found.meta["step"], again)
    if found is None:
        return None
    return Loaded(list(state.blocks), dict(found.meta), dict(found.rank_tensors))


@attrs.define(frozen=True)
class Refusal:
    """How a load that should fail went."""

    error: str
    """Text of the CheckpointError, empty if there was none."""
    problems: list[str]
    """What ``verify`` said."""
    touched: list[str]
    """Tensors that changed all the same."""


def try_to_load(case: Case, folder: Path, *, reshape: bool = False) -> Refusal:
    """Load step 1 and tell how it failed; with ``reshape``, into a run whose last tensor is larger."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    if reshape:
        *others, last = state.blocks
        wider = (last.global_shape[0] + 1, *last.global_shape[1:])
        state = attrs.evolve(state, blocks=[*others, attrs.evolve(last, global_shape=wider)])
    try:
        checkpoint.load("1", state)
        error = ""
    except CheckpointError as refused:
        error = str(refused)
    problems = list(checkpoint.verify(1)) if rank() == 0 else []
    touched = [block.name for block in state.blocks if (block.tensor != -1.0).any()]
    return Refusal(error, problems, touched)


def named(blocks: list[Block]) -> dict[str, torch.Tensor]:
    """Return a rank's blocks by name and offset."""
    return {f"{block.name}@{block.offset}": block.tensor for block in blocks}


# --- checks -----------------------------------------------------------------------------------------


@check("checkpoint", since="0.1")
def every_bit_comes_back(case: Case) -> None:
    """Blocks, JSON state and random streams come back on every rank as they were saved, bit for bit."""
    with temporary_folder() as folder:
        saved = run_ranks(save_steps, case.world_size, case, folder, [3])
        loaded = run_ranks(load, case.world_size, case, folder, "latest")
    for number, (blocks, back) in enumerate(zip(saved, loaded, strict=True)):
        assert back is not None, f"rank {number} found no checkpoint after a save"
        assert_bitwise(named(back.blocks), named(blocks), f"blocks of rank {number}")
        wanted = {"step": 3, "text": "ünïcode", "list": [1, 2.5]}
        got = {key: back.meta.get(key) for key in wanted}
        assert got == wanted, f"rank {number}: meta {got}, saved {wanted}"
        assert "torch" in back.streams, f"rank {number}: streams {sorted(back.streams)}, saved 'torch'"


@check("checkpoint", since="0.1")
def saving_again_writes_the_same_bytes(case: Case) -> None:
    """What was loaded, saved elsewhere, gives byte-equal files."""
    with temporary_folder() as one, temporary_folder() as other:
        run_ranks(save_steps, case.world_size, case, one, [3])
        run_ranks(load, case.world_size, case, one, "latest", other)
        first, second = ({p.relative_to(f): p.read_bytes() for p in files(f)} for f in (one, other))
    assert first.keys() == second.keys(), f"files {sorted(second)}, first save {sorted(first)}"
    differing = [str(path) for path in first if first[path] != second[path]]
    assert not differing, f"bytes differ in {differing}"


def files(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@check("checkpoint", since="0.1")
def resumed_run_is_the_same_run(case: Case) -> None:
    """Stopped after 3 of 6 steps and resumed: weights, state, random streams and data end bitwise equal."""
    changes = {
        "run": {"steps": 6},
        "optimizer": {**ADAMW, "lr_schedule": {"use": "cosine", "warmup_steps": 2}},
    }
    with temporary_folder() as folder:
        options: dict[str, Any] = {"folder": folder, "save_at": 3}
        through = run_ranks(train, case.world_size, case, changes, **options)
        resumed = run_ranks(train, case.world_size, case, changes, **options, resume="3")
    for number, (one, other) in enumerate(zip(through, resumed, strict=True)):
        assert_bitwise(whole_of(other), whole_of(one), f"rank {number}, resumed after step 3")
        assert_bitwise(other.streams, one.streams, f"random streams of rank {number}")
        assert other.meta == one.meta, f"rank {number}: {other.meta} instead of {one.meta}"
        losses = [[r.loss for r in t.reports if r.step > 3] for t in (other, one)]
        assert losses[0] == losses[1], f"losses after resuming {losses[0]}, without {losses[1]}"


@check("checkpoint", since="0.1", applies=distributed)
def loads_on_one_process(case: Case) -> None:
    """What several ranks saved, one process loads: the same whole tensors."""
    with temporary_folder() as folder:
        saved = run_ranks(save_steps, case.world_size, case, folder, [3])
        (loaded,) = run_ranks(load, 1, case.alone(), folder, "latest")
    assert loaded is not None, "one process found no checkpoint"
    assert_same(whole([loaded.blocks]), whole(saved), "whole tensors on one process", atol=0.0)


@check("checkpoint", since="0.1")
def empty_folder_has_no_checkpoint(case: Case) -> None:
    """Where nothing was saved, ``latest`` is None and there are no steps."""
    with temporary_folder() as folder:
        assert run_ranks(load, case.world_size, case, folder, "latest") == [None] * case.world_size


def cut_in_half(path: Path) -> None:
    """Truncate a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    """Change one bit two thirds into a file: in the tensors, where no syntax gives it away."""
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def make_empty(path: Path) -> None:
    """Leave a file without content."""
    path.write_bytes(b"")


#: A file that says which checkpoint is the newest, for people and scripts: nothing depends on it.
ADVISORY = "latest"

DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": cut_in_half,
    "bit_flipped": flip_a_bit,
    "empty": make_empty,
}


@check("checkpoint", since="0.1", variants=tuple(DAMAGE))
def damage_is_noticed(case: Case, damage: str) -> None:
    """A damaged file is a CheckpointError on every rank and shows in ``verify``; no live tensor changes."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1])
        for path in (path for path in files(folder) if path.name != ADVISORY):
            whole_file = path.read_bytes()
            DAMAGE[damage](path)
            assert_refused(run_ranks(try_to_load, case.world_size, case, folder), f"{path.name} {damage}")
            path.write_bytes(whole_file)


@check("checkpoint", since="0.2", variants=tuple(DAMAGE))
def falls_back_over_a_damaged_one(case: Case, damage: str) -> None:
    """``latest`` is the newest that is whole; a damaged one is set aside, and its step can be saved again."""
    for number in count():
        with temporary_folder() as folder:
            older, _ = (save_files(case, folder, [step]) for step in (1, 2))
            newer = [path for path in files(folder) if path not in older]
            if number == len(newer):
                break
            name = newer[number].name
            DAMAGE[damage](newer[number])
            found = run_ranks(load_then_save_second, case.world_size, case, folder)
            steps = [(back["step"], again) for back, again in found]
            wanted = 2 if name == ADVISORY else 1
            assert steps == [(wanted, [1, 2])] * case.world_size, (
                f"{name} {damage}: (step that came back, steps after saving 2 again) {steps}, "
                f"expected {(wanted, [1, 2])}"
            )


@check("checkpoint", since="0.2")
def later_steps_are_left_behind(case: Case) -> None:
    """After an older step was loaded, later ones are no steps of the run: ``latest`` is the older one."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1, 2])
        run_ranks(load, case.world_size, case, folder, "1")
        found = run_ranks(steps_and_latest, case.world_size, case, folder)
    assert found == [([1], 1)] * case.world_size, (
        f"(steps, latest) after step 1 of 1 and 2 was loaded: {found}, expected {([1], 1)} on every rank"
    )


def steps_and_latest(case: Case, folder: Path) -> tuple[list[int], Any]:
    """Return which steps there are, and the one that ``latest`` loads."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    steps = list(checkpoint.steps())
    found = checkpoint.load("latest", state)
    return steps, found and found.meta["step"]


def save_files(case: Case, folder: Path, steps: list[int]) -> list[Path]:
    """Save, and return which files there are now."""
    run_ranks(save_steps, case.world_size, case, folder, steps)
    return files(folder)


def load_then_save_second(case: Case, folder: Path) -> tuple[Any, list[int]]:
    """Load the latest, then save step 2 unless it is there; return the meta loaded and all steps."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    found = checkpoint.load("latest", state)
    assert found is not None
    if found.meta["step"] == 1:
        save(checkpoint, 2, numbered(state, 2))
    return found.meta, list(checkpoint.steps())


def assert_refused(refusals: list[Refusal], what: str, *, verified: bool = True) -> None:
    """Check that a load failed on every rank and touched nothing."""
    for number, refusal in enumerate(refusals):
        assert refusal.error, f"{what}: rank {number} loaded it"
        assert not refusal.touched, f"{what}: refused on rank {number} after filling {refusal.touched}"
    assert refusals[0].problems or not verified, f"{what}: verify found nothing"


@check("checkpoint", since="0.1")
def other_shape_is_refused(case: Case) -> None:
    """A checkpoint of a model of other shape is a CheckpointError; no live tensor changes."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1])
        refusals = run_ranks(try_to_load, case.world_size, case, folder, reshape=True)
    assert_refused(refusals, "another shape", verified=False)


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


@check("checkpoint", since="0.2")
def full_disk_on_one_rank(case: Case) -> None:
    """A rank without space fails the save on all ranks or none; nothing is left and the next succeeds."""
    for rank_of_fault in range(case.world_size):
        with temporary_folder() as folder:
            results = run_ranks(save_in_little_space, case.world_size, case, folder, rank_of_fault)
        errors = [error for error, _, _ in results]
        who = f"rank {rank_of_fault} has a full disk"
        assert all(errors) or not any(errors), f"{who}: errors of the ranks {errors}"
        assert results[0][1] == [], f"{who}: the failed save left {results[0][1]}"
        assert results[0][2][-1] == 3, f"{who}: steps after the next save {results[0][2]}"


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


def wait_for_all() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


@check("checkpoint", since="0.2", applies=distributed, variants=("fewer", "more"))
def goes_on_on_another_layout(case: Case, ranks: str) -> None:
    """Saved after 3 of 6 steps on some ranks, resumed on one, or the other way: losses, weights to 1e-9."""
    source, target = (case, case.alone()) if ranks == "fewer" else (case.alone(), case)
    changes = {"run": {"steps": 6}, "optimizer": ADAMW}
    with temporary_folder() as folder:
        straight = run_ranks(train, source.world_size, source, changes, folder=folder, save_at=3)
        found = run_ranks(train, target.world_size, target, changes, folder=folder, resume="3")
    wanted, got = ([r.loss for r in traces[0].reports if r.step > 3] for traces in (straight, found))
    assert_same({"loss": torch.tensor(got)}, {"loss": torch.tensor(wanted)}, "steps 4 to 6", atol=1e-9)
    for part in ("weights", "state"):
        here, there = (whole([getattr(t, part) for t in traces], atol=1e-9) for traces in (found, straight))
        assert_same(here, there, part, atol=1e-9)


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
    step = back.meta["step"]
    assert step in (1, 2), f"{disaster} {outcome.point}: step {step} came back, saved were 1 and 2"
    for block in back.blocks:
        wanted = torch.randn(block.global_shape, generator=torch.Generator().manual_seed(step))
        same = torch.equal(block.tensor, wanted.to(block.tensor.dtype))
        assert same, f"{disaster} {outcome.point}: {block.name} is not what step {step} saved"
