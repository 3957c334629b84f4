"""A checkpoint holds the whole state of a run, orders steps as numbers, and is due on all ranks alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts import Block
from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.checkpoint import assert_refused, steps_and_latest
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank
from nanotrain_core.testing.saving import (
    Refusal,
    open_state,
    save,
    save_steps,
    temporary_folder,
    wait_for_all,
)

#: What no checkpoint has: a weight, a moment, a vector.
MISSING: Mapping[str, tuple[str, Shape]] = {
    "weight": ("layers.0.extra.weight", (3, 2)),
    "moment": ("exp_avg/layers.0.extra.weight", (3, 2)),
    "vector": ("layers.0.extra.bias", (3,)),
}


@check("checkpoint", since="0.2", variants=tuple(MISSING))
def a_missing_tensor_is_refused(case: Case, which: str) -> None:
    """A run with a tensor that was not saved is rejected on every rank, and no live state is modified."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1])
        refusals = run_ranks(load_with_more, case.world_size, case, folder, *MISSING[which])
    assert_refused(refusals, f"a checkpoint without {MISSING[which][0]}", verified=False)


def load_with_more(case: Case, folder: Path, name: str, shape: Shape) -> Refusal:
    """Load step 1 into a run with one more tensor."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    more = Block(name, shape, (0,) * len(shape), torch.full(shape, -1.0))
    state = attrs.evolve(state, blocks=[*state.blocks, more])
    try:
        checkpoint.load("1", state)
        error = ""
    except CheckpointError as refused:
        error = str(refused)
    touched = [block.name for block in state.blocks if (block.tensor != -1.0).any()]
    return Refusal(error, [], touched)


@check("checkpoint", since="0.2")
def steps_are_numbers(case: Case) -> None:
    """Of steps 8, 9 and 10 the newest is 10, they are listed in this order, and the oldest goes first.

    So it is where a number outgrows the zeros in front of it.
    """
    for saved in ([8, 9, 10], [99, 100], [9_999, 10_000], [999_999, 1_000_000]):
        with temporary_folder() as folder:
            run_ranks(save_steps, case.world_size, case, folder, saved)
            found = run_ranks(steps_and_latest, case.world_size, case, folder)
        for number, (steps, latest) in enumerate(found):
            kept = saved[-len(steps) :]
            assert steps == kept, f"rank {number}: of {saved}, saved in this order, it lists {steps}"
            assert latest == saved[-1], f"rank {number}: 'latest' of {steps} is {latest}"


@check("checkpoint", since="0.2")
def an_older_step_sets_later_ones_aside(case: Case) -> None:
    """After a rollback to a step, no later one is listed on any rank: a resume would continue from it.

    So it is where a number outgrows the zeros in front of it.
    """
    for saved in ([9, 10, 11], [99, 100], [999_999, 1_000_000]):
        with temporary_folder() as folder:
            run_ranks(save_steps, case.world_size, case, folder, saved)
            found = run_ranks(go_back, case.world_size, case, folder)
        for number, (before, after) in enumerate(found):
            assert after == before[:1], (
                f"rank {number}: of {before}, step {before[0]} was loaded, and then it lists {after}"
            )


def go_back(case: Case, folder: Path) -> tuple[list[int], list[int]]:
    """Load the oldest step; return the steps before and after."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    before = list(checkpoint.steps())
    wait_for_all()
    checkpoint.load(str(before[0]), state)
    wait_for_all()
    return before, list(checkpoint.steps())


@check("checkpoint", since="0.2", applies=distributed)
def due_on_all_ranks_alike(case: Case) -> None:
    """Where a clock decides when to save, ranks whose clocks differ save after the same steps.

    With and without a number of steps between saves, and where saves themselves are timed.
    """
    fields = attrs.fields(case.component().config)
    steps = {field.name: 5 for field in fields if field.name == "every"}
    minutes = {
        field.name: 1.0
        for field in fields
        if field.name.endswith(("minutes", "seconds", "hours")) and isinstance(field.default, int | float)
    }
    configs: list[dict[str, Any]] = [steps, {}]
    if minutes:
        configs.append({**steps, **minutes})
    for config in configs:
        timed = attrs.evolve(case, config={**config, **case.config})
        with temporary_folder() as folder:
            ranks = run_ranks(when_due, case.world_size, timed, folder)
        for number, due in enumerate(ranks):
            assert due == ranks[0], (
                f"with clocks that differ between ranks, rank {number} would save after steps {due}, rank "
                f"0 after {ranks[0]}: let one rank decide, and tell the others"
            )


def when_due(case: Case, folder: Path) -> list[int]:
    """Return the first steps after which a run would save, by clocks that differ between ranks."""
    with other_clock() as clock:
        checkpoint, state = open_state(case, folder)
        save(checkpoint, 1, state)  # whose age may be asked for
        if rank():
            clock.seconds, clock.uneven = DAY, Random(rank())
        steps: list[int] = []
        for step in range(2, 1000):
            due = checkpoint.due(step)
            if due:
                steps.append(step)
            if not agreed(due):
                break  # a save would wait for the other ranks for ever
            if due:
                save(checkpoint, step, state)
            if len(steps) == 4:
                break
        return steps


def agreed(value: bool) -> bool:
    """Return whether ``value`` is the same on all ranks."""
    count = torch.tensor(int(value))
    dist.all_reduce(count)
    return int(count) in (0, dist.get_world_size())


#: Longer than any time between two saves that is worth a default.
DAY = 86_400.0


@attrs.define
class Clock:
    """A clock that stands still, except for this many seconds or more at every reading."""

    seconds: float = 1e-6
    uneven: Random | None = None
    """Makes readings take up to 10,000 times as long: ratios of durations differ from other ranks'."""
    ahead: float = 0.0

    def tick(self) -> float:
        """Return the time of one more reading."""
        self.ahead += self.seconds * (10 ** self.uneven.uniform(0, 4) if self.uneven is not None else 1.0)
        return self.ahead


@contextmanager
def other_clock() -> Iterator[Clock]:
    """Make every reading use a clock that the check controls, whatever name a module has for it."""
    names = [f"{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns")]
    real: Mapping[str, Callable[[], float]] = {name: getattr(time, name) for name in names}
    began, told = {name: real[name]() for name in names}, Clock()

    def read(name: str) -> Callable[[], float]:
        def clock() -> float:
            ahead = told.tick()
            return began[name] + (int(ahead * 1e9) if name.endswith("_ns") else ahead)

        return clock

    clocks: dict[Any, Callable[[], float]] = {real[name]: read(name) for name in names}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(time, name, clocks[real[name]]))
        for module in [*sys.modules.values()]:
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                package = getattr(module, "__name__", "").partition(".")[0]
                known = module is not time and package not in UNTOUCHED and _is_one_of(value, clocks)
                if known:
                    stack.enter_context(mock.patch.object(module, name, clocks[value]))
        yield told


#: Modules that keep their own clock: a run's own machinery, not the component's.
UNTOUCHED = {"torch", "multiprocessing", "threading", "queue", "asyncio", "selectors", "subprocess"}


def _is_one_of(value: Any, clocks: Mapping[Any, Any]) -> bool:
    return any(value is clock for clock in clocks)


@check("checkpoint", since="0.3")
def each_file_has_one_writer(case: Case) -> None:
    """Where reports list the files that ranks wrote, each file is listed by the one rank that wrote it."""
    with temporary_folder() as folder:
        ranks = run_ranks(save_and_tell, case.world_size, case, folder)
        path = ranks[0][0]
        there = {path} if path.is_file() else {each for each in path.rglob("*") if each.is_file()}
        named = sorted(file for _, files in ranks for file in files)
    if named:
        twice = [str(file) for file, other in pairwise(named) if file == other]
        assert not twice, f"two ranks say that they wrote {twice[0]}"
        assert {*named} == there, (
            f"reports name {[*map(str, named)]}, and there are {sorted(map(str, there))}"
        )


def save_and_tell(case: Case, folder: Path) -> tuple[Path, list[Path]]:
    """Save, and return the checkpoint's path and the files that this rank reports."""
    checkpoint, state = open_state(case, folder)
    checkpoint.save(1, state)
    (report,) = checkpoint.advance(wait=True)
    return report.path, list(report.written)
