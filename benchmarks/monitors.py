"""What looking costs: a step of the ``laptop`` recipe with monitors, and without, in turns.

They are ``health`` at its standard level, and all of nanotrain-performance.

On one rank a step is timed by the processor time that it took; on four, which wait for one another, by the
clock of rank 0. Both are noisy on a shared machine, so the column ``own`` has the processor time of rank 0
that went into monitors, their taps and the reduction of what they publish, over that of all the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise, product
from operator import truediv
from statistics import median
from typing import Any

import attrs
import torch

from benchmarks.report import spread, verdict
from nanotrain_core.contracts import Monitor, UpdateReport
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.metrics.board import Board
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.run.events import Events
from nanotrain_core.run.taps import Taps
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank

RANKS = (1, 4)
#: Steps between logged ones.
LOG_EVERY = (1, 10)
#: The monitors of each row.
MONITORS = {
    "health": ("health",),
    "performance": ("throughput", "memory", "pipeline", "device", "goodput"),
}


#: Where a step works for monitors.
WORK = (
    *((Events, name) for name in ("before_update", "after_update", "step", "metrics")),
    (Board, "logged"),
    (Taps, "_call"),
)


class Meter:
    """Adds up the processor time of :data:`WORK`."""

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
            self.within, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began
                self.within = False

        return timed


class Clock(Monitor):
    """Reads a clock once a step."""

    reads_weights = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.read: list[float] = []

    def on_before_update(self, update: UpdateReport) -> None:
        """Read it."""
        self.read.append(self.clock())


@attrs.define(frozen=True)
class Looking:
    """Milliseconds of a step with and without, medians, and in each round by how much it took longer."""

    KIND = "monitors"
    TITLE = "Milliseconds of a step of `laptop` with monitors, and without."
    HEADER = ("monitors", "ranks", "log_every", "with", "without", "own", "ratio", "spread", "bar", "")
    BAR = 1.01

    monitors: str
    ranks: int
    log_every: int
    watched: float
    alone: float
    own: float
    """Share of a step's processor time that goes into monitors, without what a run without any takes."""
    ratios: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return median(self.ratios) <= self.BAR

    def row(self) -> list[str]:
        numbers = [
            f"{self.watched:.1f}",
            f"{self.alone:.1f}",
            f"{self.own:.2%}",
            f"{median(self.ratios):.3f}",
        ]
        places = [self.monitors, str(self.ranks), str(self.log_every)]
        return [*places, *numbers, spread(self.ratios, ".3f"), f"{self.BAR:.2f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": median(self.ratios), "bar": self.BAR, "passed": self.passed}


def measure(*, rounds: int, steps: int = 40) -> list[Looking]:
    """Take ``rounds`` turns of ``steps`` steps of each side, after one to warm up."""
    found = []
    for kind, ranks, log_every in product(MONITORS, RANKS, LOG_EVERY):
        watched, alone, own = run_ranks(times, ranks, kind, ranks, log_every, rounds, steps, timeout=3600)[0]
        ratios = tuple(map(truediv, watched, alone))
        found.append(Looking(kind, ranks, log_every, median(watched), median(alone), own, ratios))
    return found


def monitors_of(kind: str) -> list[Monitor]:
    """Make the monitors of one row."""
    registry = load_plugins()
    found: list[Monitor] = []
    for name in MONITORS[kind]:
        component = registry.get("monitor", name)
        found.append(registry.build(Selection("monitor", name, component.config())))
        found[-1].declared = component.metrics
    return found


def times(
    kind: str, ranks: int, log_every: int, rounds: int, steps: int
) -> tuple[list[float], list[float], float]:
    """Return milliseconds of a step, the mean of each round, with the monitors and without; and the monitors'
    own share."""
    torch.set_num_threads(1)
    overrides = [f"run.ranks={ranks}", f"run.log_every={log_every}", "evaluation.sequences=0", "monitor=[]"]
    recipe = load_recipe("laptop", overrides=[*overrides, "run.device=cpu"])
    engine = RuntimeEngine.from_recipe(recipe, rank=rank())
    taken: tuple[list[float], list[float]] = ([], [])
    shares: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            clock, meter = Clock(time.process_time if ranks == 1 else time.perf_counter), Meter()
            engine.events.monitors = [clock] if side else [clock, *monitors_of(kind)]
            began = time.process_time()
            with meter.running():
                engine.fit(steps=engine.step + steps + 1)
            each = [1e3 * (after - before) for before, after in pairwise(clock.read)]
            if number:
                taken[side].append(sum(each) / len(each))
                shares[side].append(meter.seconds / (time.process_time() - began))
    return *taken, median(shares[0]) - median(shares[1])
