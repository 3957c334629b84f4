"""What looking costs: a step of the ``laptop`` recipe with a monitor of the standard level, and without, in
turns.

The monitor publishes, in every logged step, norms of gradient, weights and update, their ratio, and
statistics of the first, middle and last layer. On one rank a step is timed by the processor time that it
took; on four, which wait for one another, by the clock of rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from operator import truediv
from statistics import median
from typing import Any

import attrs
import torch

from benchmarks.report import spread, verdict
from nanotrain_core.contracts import MetricsReport, Monitor, RunInfo, UpdateReport
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.metrics.declared import Metric
from nanotrain_core.recipe import load_recipe
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank

RANKS = (1, 4)
#: Steps between logged ones.
LOG_EVERY = (1, 10)


class Standard(Monitor):
    """Looks at what a run should show at all times."""

    declared = (
        Metric(name="{what}/norm", unit="1", group="health", summary="of all parameters", cost="weights"),
        Metric(name="residual/{statistic}/{layer}", unit="1", group="health", summary="", cost="layers"),
    )

    def __init__(self) -> None:
        self.told = 0

    def on_start(self, run: RunInfo) -> None:
        """Look at three layers."""
        self.run = run
        run.tap(
            lambda name, x: run.metrics.statistics(f"residual/{{statistic}}/{name}", x, ("rms", "max_abs"))
        )

    def on_before_update(self, update: UpdateReport) -> None:
        """Publish norms of what is there."""
        if update.logged:
            self.run.metrics.placed("gradients/{statistic}", update.placed_gradients())
            self.run.metrics.placed("weights/{statistic}", self.run.weights())
            update.keep_weights()

    def on_after_update(self, update: UpdateReport) -> None:
        """Publish the norm of the change."""
        self.run.metrics.placed("updates/{statistic}", update.changes())

    def on_metrics(self, report: MetricsReport) -> None:
        """Count what was told."""
        self.told += len(report.published)


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
    TITLE = "Milliseconds of a step of `laptop` with standard metrics, and without."
    HEADER = ("ranks", "log_every", "with", "without", "ratio", "spread", "bar", "")
    BAR = 1.01

    ranks: int
    log_every: int
    watched: float
    alone: float
    ratios: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return median(self.ratios) <= self.BAR

    def row(self) -> list[str]:
        numbers = [f"{self.watched:.1f}", f"{self.alone:.1f}", f"{median(self.ratios):.3f}"]
        places = [str(self.ranks), str(self.log_every)]
        return [*places, *numbers, spread(self.ratios, ".3f"), f"{self.BAR:.2f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": median(self.ratios), "bar": self.BAR, "passed": self.passed}


def measure(*, rounds: int, steps: int = 10) -> list[Looking]:
    """Take ``rounds`` turns of ``steps`` steps of each side, after one to warm up."""
    found = []
    for ranks in RANKS:
        for log_every in LOG_EVERY:
            watched, alone = run_ranks(times, ranks, ranks, log_every, rounds, steps, timeout=3600)[0]
            ratios = tuple(map(truediv, watched, alone))
            found.append(Looking(ranks, log_every, median(watched), median(alone), ratios))
    return found


def times(ranks: int, log_every: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of a step, the mean of each round, with the monitor and without."""
    torch.set_num_threads(1)
    overrides = [f"run.ranks={ranks}", f"run.log_every={log_every}", "evaluation.sequences=0", "monitor=[]"]
    recipe = load_recipe("laptop", overrides=[*overrides, "run.device=cpu"])
    engine = RuntimeEngine.from_recipe(recipe, rank=rank())
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            clock = Clock(time.process_time if ranks == 1 else time.perf_counter)
            engine.events.monitors = [clock] if side else [clock, Standard()]
            engine.fit(steps=engine.step + steps + 1)
            each = [1e3 * (after - before) for before, after in pairwise(clock.read)]
            if number:
                taken[side].append(sum(each) / len(each))
    return taken
