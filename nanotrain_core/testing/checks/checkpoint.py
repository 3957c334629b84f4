"""A checkpoint is complete or absent, restores every bit, and detects damage before it modifies a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.points import of_each_kind
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import train
from nanotrain_core.testing.saving import (
    ADAMW,
    Refusal,
    load,
    named,
    numbered,
    open_state,
    save,
    save_steps,
    temporary_folder,
    try_to_load,
    wait_for_all,
)


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


@check("checkpoint", since="0.2")
def async_save_is_isolated(case: Case) -> None:
    """What is saved is the state at ``save``, whatever the timing of ``settle`` and ``advance``."""
    with temporary_folder() as folder:
        saved = run_ranks(save_then_train, case.world_size, case, folder)
        loaded = run_ranks(load, case.world_size, case, folder, "latest")
    for number, (expected, back) in enumerate(zip(saved, loaded, strict=True)):
        assert back is not None, f"rank {number} found no checkpoint after a save"
        found = named(back.blocks)
        assert_bitwise(found, expected, f"blocks of rank {number}, changed after settle()")


def save_then_train(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Save, modify everything as soon as that is allowed, and finish; return the state at the save."""
    checkpoint, state = open_state(case, folder)
    state = numbered(state, 1)
    before = {name: tensor.clone() for name, tensor in named(state.blocks).items()}
    checkpoint.save(1, state)
    checkpoint.settle()
    for block in state.blocks:
        block.tensor.fill_(-1.0)
    checkpoint.advance(wait=True)
    return before


@check("checkpoint", since="0.1")
def saving_again_writes_the_same_bytes(case: Case) -> None:
    """A loaded state, saved elsewhere, gives byte-equal files."""
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
    """One process loads what several ranks saved: the same whole tensors."""
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


@check("checkpoint", since="0.2", applies=lambda case: case.component().listing is not None)
def listing_shows_what_was_saved(case: Case) -> None:
    """The listing shows each checkpoint, with what ``nanotrain ckpt`` shows of it, and detects damage."""
    list_checkpoints = case.component().load_optional("listing")
    with temporary_folder() as folder:
        assert list(list_checkpoints(folder)) == [], "it lists something in an empty folder"
        ranks = run_ranks(save_steps, case.world_size, case, folder / "checkpoints", [3, 5])
        newest = list_checkpoints(folder)[-1]
        for at, wanted in ((folder, [3, 5]), (folder / "checkpoints", [3, 5]), (newest.path, [5])):
            steps = [saved.step for saved in list_checkpoints(at)]
            assert steps == wanted, f"steps {steps} at {at.relative_to(folder)}, saved {wanted}"
        said = newest.describe()
        assert (said["world_size"], said["meta"]["step"]) == (case.world_size, 5), f"it says {said}"
        shapes = {name: tuple(tensor["shape"]) for name, tensor in said["tensors"].items()}
        assert shapes == {block.name: block.global_shape for blocks in ranks for block in blocks}
        assert said["files"], "it names no file"
        for name, entry in said["files"].items():
            assert isinstance(entry, Mapping), f"{name}: {entry!r}, expected an object with sha256"
            assert "sha256" in entry, f"{name}: {entry!r}, expected sha256 among it"
        assert list(newest.verify()) == [], "it finds damage in a whole checkpoint"
        cut_in_half(max(files(folder), key=lambda path: (f"{newest.path}" in f"{path}", path.stat().st_size)))
        assert newest.verify(), "it finds no damage in a checkpoint with a file cut in half"


def cut_in_half(path: Path) -> None:
    """Truncate a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    """Flip one bit two thirds into a file: in the tensors, where no syntax check detects it."""
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def make_empty(path: Path) -> None:
    """Truncate a file to zero length."""
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
    """``latest`` is the newest intact one; a damaged one is set aside, and its step can be saved again."""
    for number in count():
        with temporary_folder() as folder:
            older, _ = (save_files(case, folder, [step]) for step in (1, 2))
            newer = of_each_kind([path for path in files(folder) if path not in older])
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
def damaged_ones_stay_if_no_other_is_left(case: Case) -> None:
    """With all checkpoints damaged, ``latest`` is refused each time: a later launch does not start over."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1, 2])
        for path in (path for path in files(folder) if path.name != ADVISORY):
            cut_in_half(path)
        before = files(folder)
        for launch in ("the first", "the next"):
            errors = run_ranks(try_to_go_on, case.world_size, case, folder)
            assert all(errors), f"{launch} load of 'latest', all damaged: errors of the ranks {errors}"
        assert files(folder) == before, f"files after refused loads are {files(folder)}, before {before}"


def try_to_go_on(case: Case, folder: Path) -> str:
    """Load the latest; return the error, empty if there was none."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    try:
        checkpoint.load("latest", state)
    except CheckpointError as refused:
        return str(refused)
    return ""


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


@check("checkpoint", since="0.2")
def another_branch_is_left_behind(case: Case) -> None:
    """A run that resumes from another folder's checkpoint leaves all those of its own folder behind."""
    with temporary_folder() as folder, temporary_folder() as other:
        run_ranks(save_steps, case.world_size, case, folder, [1, 3])
        path, *_ = run_ranks(path_of_second, case.world_size, case, other)
        run_ranks(load, case.world_size, case, folder, str(path))
        found = run_ranks(steps_and_latest, case.world_size, case, folder)
    assert found == [([], None)] * case.world_size, (
        f"(steps, latest) where 1 and 3 were, after 2 of another folder was loaded: {found}, expected none"
    )


@check("checkpoint", since="0.2")
def what_the_run_cannot_be_touches_nothing(case: Case) -> None:
    """A checkpoint that the run does not accept changes no live tensor and moves no later step aside."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1, 2])
        for seen, touched, steps in run_ranks(load_unaccepted, case.world_size, case, folder):
            assert seen == 1, f"the run was shown step {seen}, and asked for 1"
            assert not touched, f"refused after filling {touched}"
            assert steps == [1, 2], f"steps after a refused load of 1 are {steps}"


def load_unaccepted(case: Case, folder: Path) -> tuple[Any, list[str], list[int]]:
    """Load step 1 and reject it; return the offered step, modified tensors, and existing steps."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    shown = []

    def refuse(meta: Mapping[str, Any]) -> None:
        shown.append(meta["step"])
        raise CheckpointError("of another model")

    try:
        checkpoint.load("1", attrs.evolve(state, accept=refuse))
    except CheckpointError:
        wait_for_all()
    touched = [block.name for block in state.blocks if (block.tensor != -1.0).any()]
    return next(iter(shown), None), touched, list(checkpoint.steps())


def path_of_second(case: Case, folder: Path) -> Path:
    """Save step 2; return the reported path of the checkpoint."""
    checkpoint, state = open_state(case, folder)
    checkpoint.save(2, numbered(state, 2))
    (report,) = checkpoint.advance(wait=True)
    return report.path


def steps_and_latest(case: Case, folder: Path) -> tuple[list[int], Any]:
    """Return the existing steps, and the one that ``latest`` loads."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    steps = list(checkpoint.steps())
    found = checkpoint.load("latest", state)
    return steps, found and found.meta["step"]


def save_files(case: Case, folder: Path, steps: list[int]) -> list[Path]:
    """Save, and return the existing files."""
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
    """Check that a load failed on every rank and modified nothing."""
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


def _exactly(case: Case) -> bool:
    """On several ranks, in double precision: in others each layout rounds a step in its own way."""
    return distributed(case) and case.overrides.get("precision", {"use": "fp64"})["use"] == "fp64"


@check("checkpoint", since="0.2", applies=_exactly, variants=("fewer", "more"))
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
