"""``--trace``: a step that really happens on gloo beside the predicted one, collective by collective."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import attrs
import torch.distributed as dist

from nanotrain_core.api import (
    Layout,
    NanotrainError,
    PhaseTimeline,
    PluginArguments,
    Resolution,
    resolve_recipe,
)
from nanotrain_core.api.ranks import RankFailure, run_ranks
from nanotrain_plan.comms import axis_of
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.origin import place_of
from nanotrain_plan.dry.real import StepRecord, predict, quiet, real_recipe, record_step
from nanotrain_plan.rendering.parts import Bytes, Ranks, Section, Statement, Table, say

#: Seconds that a step of a recipe small enough may take on a machine that is busy.
TIMEOUT = 1800.0


@attrs.define(frozen=True)
class RankTrace:
    """One rank's second step."""

    rank: int
    predicted: Sequence[tuple[str, Collective]]
    real: Sequence[tuple[str, Collective]]

    @property
    def difference(self) -> int | None:
        """The first collective that is another, from 0; None if all are as predicted."""
        pairs = zip(self.predicted, self.real, strict=False)
        found = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if found is None and len(self.predicted) != len(self.real):
            return min(len(self.predicted), len(self.real))
        return found


@attrs.define(frozen=True)
class Trace:
    """Of all ranks."""

    layout: Layout
    ranks: Sequence[RankTrace]

    @property
    def same(self) -> bool:
        """Whether everything was exchanged as predicted: count, bytes, order and group."""
        return all(each.difference is None for each in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` has under ``trace``."""
        return {
            "same": self.same,
            "ranks": [
                {
                    "rank": each.rank,
                    "first_difference": each.difference,
                    "predicted": [_plain(*found) for found in each.predicted],
                    "real": [_plain(*found) for found in each.real],
                }
                for each in self.ranks
            ],
        }


def _plain(when: str, found: Collective) -> dict[str, Any]:
    return {"when": when, **attrs.asdict(found)}


class Progress:
    """Tells on stderr what a trace does, and for how long it has been at work."""

    def __init__(self) -> None:
        self._start = time.time()  # ranks, other processes, go on from it

    def __call__(self, doing: str) -> None:
        """Print a line."""
        print(f"nanotrain: {time.time() - self._start:4.0f} s: {doing}", file=sys.stderr, flush=True)


def compare(
    args: argparse.Namespace, plugins: PluginArguments, found: Resolution, progress: Progress
) -> Trace:
    """Predict a step of every rank, and train on as many processes of this machine.

    Of a recipe with phases it is a step with the largest batch of them, as in all of the explanation.

    Raises:
        NanotrainError: a rank failed; the text has the first cause.
    """
    ranks = found.layout.world_size
    progress(f"predicting a step of {ranks:,} ranks")
    predicted = predict(PhaseTimeline(found.recipe).largest(), found.registry, found.layout)
    progress(f"starting {ranks:,} processes, which import torch and meet")
    try:
        with _exit_on_sigterm():
            real: list[StepRecord] = run_ranks(
                _train,
                ranks,
                *(args.recipe, args.set, plugins, ranks, progress),
                timeout=TIMEOUT,
                check_collectives=False,
            )
    except RankFailure as failure:
        raise NanotrainError(f"--trace: {failure}") from failure
    progress("comparing the collectives of all ranks")
    pairs = zip(predicted, real, strict=True)
    return Trace(found.layout, [RankTrace(n, a.collectives, b.collectives) for n, (a, b) in enumerate(pairs)])


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process in order, which closes the pool of ranks and removes its folder."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _train(
    recipe: str, overrides: Sequence[str], plugins: PluginArguments, ranks: int, progress: Progress
) -> StepRecord:
    """Be one rank; rank 0 tells what all of them do."""
    assert dist.get_world_size() == ranks
    tell = progress if dist.get_rank() == 0 else quiet
    tell("building the model on every rank")
    found = resolve_recipe(recipe, overrides=overrides, plugins=plugins, ranks=ranks)
    real = real_recipe(PhaseTimeline(found.recipe).largest(), found.registry)
    return record_step(real, found.registry, tell)


def section_of(trace: Trace) -> Section:
    """Return both steps side by side: of each rank, sums of each operation and group, and the order."""
    body: list[Statement | Table] = [
        say(
            "Two steps were trained on {ranks:,} processes with gloo, PyTorch's kernels and the recipe's "
            "data; routers were made to send every expert equally many tokens, as is predicted. This is the "
            "second.",
            place_of(record_step),
            ranks=trace.layout.world_size,
        )
    ]
    rows = []
    for each in trace.ranks:
        sums = _sums(each.predicted), _sums(each.real)
        for op, group in dict.fromkeys([*sums[0], *sums[1]]):
            (a, b), (c, d) = (side.get((op, group), (0, 0)) for side in sums)
            axis = axis_of(group, op, trace.layout)
            told = (each.rank, op.replace("_", "-"), axis, Ranks(group), a, c, Bytes(b), Bytes(d))
            rows.append((*told, "same" if (a, b) == (c, d) else "differs"))
        body.append(_verdict(each))
    columns = (
        "rank",
        "collective",
        "axis",
        "ranks",
        "predicted",
        "real",
        "bytes predicted",
        "bytes real",
        "",
    )
    return Section("What really happened", [*body, Table(columns, rows)])


def _sums(found: Sequence[tuple[str, Collective]]) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for _, each in found:
        counts[each.op, each.ranks] += 1
        sizes[each.op, each.ranks] += each.bytes
    return {key: (count, sizes[key]) for key, count in counts.items()}


def _verdict(each: RankTrace) -> Statement:
    where = place_of(predict)
    if each.difference is None:
        return say(
            "Rank {rank}: all {count:,} collectives and messages were as predicted, in their order.",
            where,
            rank=each.rank,
            count=len(each.real),
        )
    n = each.difference
    return say(
        "Rank {rank}: number {number:,} differs: {predicted} was predicted, {real} happened.",
        where,
        rank=each.rank,
        number=n + 1,
        predicted=_told(each.predicted, n),
        real=_told(each.real, n),
    )


def _told(found: Sequence[tuple[str, Collective]], number: int) -> str:
    if number >= len(found):
        return "nothing more"
    when, each = found[number]
    return f"{each.op.replace('_', '-')} of ranks {list(each.ranks)}, {each.bytes:,} bytes, in {when}"
