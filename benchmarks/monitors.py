"""What looking costs: a step of the ``laptop`` recipe with monitors, and without.

    python -m benchmarks monitors                          # all rows, on 1 rank and on 4: about 20 minutes
    python -m benchmarks monitors standard --ranks 4       # one row in four

They are ``health`` at its standard level, all of nanotrain-performance, and both together, ``standard``: what
docs/monitoring.md calls the standard level. All have their default settings: every step is logged, and of
these one in 40 reads tensors.

Both sides take turns, the order of a pair changing with each, so that what else the machine does is in both.
Of each pair there are two ratios: of the processor time of all ranks, and of the seconds by the clock of
rank 0. Both are noisy on a shared machine. So the bar is on the column ``own``: the processor time that ranks
spend in monitors, in observers of modules and in reducing what they publish, over that of their steps, less
what a run without monitors spends there. It is the time of all threads: gloo's, in a reduction through
sockets, take ten times as long as the one that waits for them. It has not what monitors push out of caches:
the ratios have. They must not contradict it: their lower quartile is under the same bar. The first steps of a
turn, in which ranks agree on the names of all metrics, count in none of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import attrs
import torch

from benchmarks.report import markdown, verdict, write_json
from nanotrain_core.contracts import Monitor, UpdateReport
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.launch.environment import loopback
from nanotrain_core.metrics.reducer import MetricReducer
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.run.events import Events
from nanotrain_core.run.module_observers import ModuleObservers
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank

RANKS = (1, 4)
#: Steps of a turn: one in this many reads tensors.
STEPS = 40
#: The monitors of each row.
MONITORS = {
    "health": ("health",),
    "performance": ("throughput", "memory", "pipeline", "device", "goodput"),
    "standard": ("health", "throughput", "memory", "pipeline", "device", "goodput"),
}


#: Steps of a turn in which metrics may be published for the first time.
FIRST = 12
#: Where a step works for monitors.
WORK = (
    *((Events, name) for name in ("before_update", "after_update", "step", "metrics")),
    (MetricReducer, "logged"),
    (ModuleObservers, "_call"),
)


class Meter:
    """Adds up the processor time of :data:`WORK`, of all threads: a rank that waits for gloo's works, too."""

    def __init__(self) -> None:
        self.seconds, self.within = 0.0, False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure meanwhile."""
        before = [(kind, name, getattr(kind, name)) for kind, name in WORK]
        for kind, name, function in before:
            setattr(kind, name, self.timed(function))
        try:
            yield
        finally:
            for kind, name, function in before:
                setattr(kind, name, function)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed but within another one."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.within:
                return function(*args, **kwargs)
            self.within, began = True, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began
                self.within = False

        return timed


@attrs.define(frozen=True)
class Turn:
    """Milliseconds of a step of one rank, the mean of a turn's steps."""

    cpu: float
    wall: float
    own: float
    """Of ``cpu``, those in which the rank works for monitors."""


class Clock(Monitor):
    """Reads clocks once a step."""

    reads_weights = False

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.read: list[tuple[float, float, float]] = []

    def on_before_update(self, update: UpdateReport) -> None:
        """Read them."""
        self.read.append((time.process_time(), time.perf_counter(), self.meter.seconds))

    def turn(self, steps: int) -> Turn:
        """Return what the last ``steps`` took."""
        pairs = zip(self.read[-1 - steps], self.read[-1], strict=True)
        return Turn(*(1e3 * (after - before) / steps for before, after in pairs))


@attrs.define(frozen=True)
class Looking:
    """What a step takes with and without monitors: processor milliseconds of all ranks, medians of turns, and
    ratios of each pair of turns."""

    KIND = "monitors"
    TITLE = "Processor milliseconds of a step of `laptop`, all ranks together, with monitors and without."
    HEADER = (
        "monitors",
        "ranks",
        "with",
        "without",
        "own",
        "CPU",
        "quartiles",
        "clock",
        "quartiles",
        "bar",
        "",
    )
    BAR = 1.01

    monitors: str
    ranks: int
    watched: float
    alone: float
    own: float
    """Share of a step's processor time that goes into monitors, without what a run without any takes."""
    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    @property
    def passed(self) -> bool:
        low, _, _ = quantiles(self.cpu, n=4, method="inclusive")
        return 1 + self.own <= self.BAR and low <= self.BAR

    def row(self) -> list[str]:
        numbers = [f"{self.watched:.1f}", f"{self.alone:.1f}", f"{self.own:.2%}"]
        ratios = [cell for each in (self.cpu, self.wall) for cell in quartiles(each)]
        return [self.monitors, str(self.ranks), *numbers, *ratios, f"{self.BAR:.2f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "bar": self.BAR, "passed": self.passed}


def quartiles(ratios: Sequence[float]) -> tuple[str, str]:
    """Return the median, and the first and the third quartile.

    >>> quartiles([1.0, 1.2, 1.1])
    ('1.100', '1.050 to 1.150')
    """
    first, middle, third = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f}", f"{first:.3f} to {third:.3f}"


def measure(
    *, rounds: int, steps: int = STEPS, rows: Sequence[str] = (*MONITORS,), of: Sequence[int] = RANKS
) -> list[Looking]:
    """Take ``rounds`` pairs of turns of ``steps`` steps, after one to warm up.

    Args:
        rows: keys of :data:`MONITORS`.
        of: how many ranks there are, in one row each.
    """
    found = []
    for kind, ranks in product(rows, of):
        print(f"{kind} on {ranks} ranks: {rounds} rounds", file=sys.stderr, flush=True)
        # Users' runs do not have torch's comparison of every collective, which costs a millisecond a step.
        pairs = run_ranks(
            turns, ranks, kind, ranks, max(2, rounds), steps, timeout=3600, check_collectives=False
        )
        found.append(compare(kind, pairs))
        print(" ", " | ".join(found[-1].row()), file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure what is named, print a table, and return 0 if every bar was passed, else 1."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks monitors", description=about)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(MONITORS)} (default: all)")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="(default: both)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (default: 9)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a turn (default: {STEPS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    args = parser.parse_args(arguments)
    if unknown := sorted({*args.rows} - {*MONITORS}):
        parser.error(f"no row named {', '.join(unknown)}; there are {', '.join(MONITORS)}")
    if args.steps % STEPS or args.steps < 1 or args.rounds < 2:
        parser.error(
            f"expected 2 rounds or more, of {STEPS} steps or a multiple: of {STEPS} one reads tensors"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback() or "")  # as `nanotrain run` sets it
    rows, of = args.rows or (*MONITORS,), (args.ranks,) if args.ranks else RANKS
    found = measure(rounds=args.rounds, steps=args.steps, rows=rows, of=of)
    print(markdown(found))
    if args.json:
        write_json(args.json, found)
    return 0 if all(each.passed for each in found) else 1


def compare(kind: str, of_ranks: Sequence[Sequence[tuple[Turn, Turn]]]) -> Looking:
    """Return the row of the pairs, each with monitors and without, that every rank has measured."""
    cpu, wall, own = [], [], []
    for pair in zip(*of_ranks, strict=True):  # of each rank
        watched, alone = zip(*pair, strict=True)
        total = [sum(turn.cpu for turn in side) for side in (watched, alone)]
        cpu.append((total[0], total[1]))
        wall.append(watched[0].wall / alone[0].wall)
        shares = [sum(t.own for t in side) / sum(t.cpu for t in side) for side in (watched, alone)]
        own.append(shares[0] - shares[1])
    with_them, without = (median(each) for each in zip(*cpu, strict=True))
    ratios = tuple(more / less for more, less in cpu)
    return Looking(kind, len(of_ranks), with_them, without, median(own), ratios, tuple(wall))


def monitors_of(kind: str) -> list[Monitor]:
    """Make the monitors of one row."""
    registry = load_plugins()
    found: list[Monitor] = []
    for name in MONITORS[kind]:
        component = registry.get("monitor", name)
        found.append(registry.build(Selection("monitor", name, component.config())))
        found[-1].declared = component.metrics
    return found


def turns(kind: str, ranks: int, rounds: int, steps: int) -> list[tuple[Turn, Turn]]:
    """Return this rank's pairs of turns, with the monitors and without."""
    torch.set_num_threads(1)
    overrides = [f"run.ranks={ranks}", "evaluation.sequences=0", "monitor=[]", "run.device=cpu"]
    engine = RuntimeEngine.from_recipe(load_recipe("laptop", overrides=overrides), rank=rank())
    pairs = []
    for number in range(rounds + 1):
        pair = {}
        for watched in (True, False) if number % 2 else (False, True):
            meter = Meter()
            clock = Clock(meter)
            engine.events.monitors = [clock, *(monitors_of(kind) if watched else [])]
            with meter.running():
                engine.fit(steps=engine.step + FIRST + steps + 1)
            pair[watched] = clock.turn(steps)
        if number:
            pairs.append((pair[True], pair[False]))
    return pairs
