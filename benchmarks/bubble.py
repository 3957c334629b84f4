"""Whether a pipeline stands idle as long as the simulation of its schedule says, on equal stages.

The simulation is given the times that each stage's forward, backward and weight gradients took, without
waiting. Embedding and head have few tokens, so that stages are equal.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs

from benchmarks.cases import RECIPE
from benchmarks.report import verdict
from nanotrain_core.actions import Action
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry import load_plugins
from nanotrain_core.testing import run_ranks
from nanotrain_core.timeline import Durations, simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v")
MICROBATCHES = 8

Key = tuple[str, int]
"""Kind of action, and stage."""


@attrs.define(frozen=True)
class Bubble:
    """Idle share of all ranks together, median over steps, and what the simulation says."""

    KIND = "bubbles"
    TITLE = f"Idle share of a pipeline of equal stages, {MICROBATCHES} microbatches."
    HEADER = ("schedule", "ranks", "idle, measured", "simulated", "")

    schedule: str
    pp: int
    measured: float
    simulated: float
    cores: int

    @property
    def counts(self) -> bool:
        """Whether every rank had a core of its own: ranks that share one wait for it too."""
        return self.pp <= self.cores

    @property
    def passed(self) -> bool:
        """Within a tenth of the simulation."""
        return not self.counts or abs(self.measured - self.simulated) <= 0.1 * self.simulated

    def row(self) -> list[str]:
        shares = [f"{self.measured:.1%}", f"{self.simulated:.1%}"]
        last = verdict(self.passed) if self.counts else f"ranks share {self.cores} cores"
        return [self.schedule, str(self.pp), *shares, last]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


@attrs.define(frozen=True)
class Times:
    """What one rank measured, in seconds."""

    actions: dict[Key, list[float]]
    """Of each action, without waiting for other stages."""
    steps: list[float]
    """Of its whole list."""


class Stopwatch:
    """Times the actions of an executor, and its steps."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.handover = executor, executor.handover
        self.times = Times(defaultdict(list), [])
        self._execute, self._run = executor._execute, executor.run
        executor._execute, executor.run = self.execute, self.run

    def execute(self, action: Action) -> None:
        """Run one action."""
        began, waited = time.perf_counter(), self.handover.waited
        self._execute(action)
        seconds = time.perf_counter() - began - (self.handover.waited - waited)
        self.times.actions[action.kind, action.stage].append(seconds)

    def run(self, *arguments: Any) -> Any:
        """Run one step."""
        began = time.perf_counter()
        losses = self._run(*arguments)
        self.times.steps.append(time.perf_counter() - began)
        return losses


def recipe(schedule: str, pp: int) -> Recipe:
    """Return a pipeline of equal stages, of 8 layers in all."""
    changes = {
        "topology.pp": pp,
        "schedule.use": f'"{schedule}"',
        "model.layers": 8,
        "model.vocab": 64,
        "data.vocab": 64,
        "batch.microbatch": 1,
        "batch.sequences": MICROBATCHES,
    }
    return load_recipe(RECIPE, overrides=[f"{key}={value}" for key, value in changes.items()], ranks=pp)


def time_rank(schedule: str, pp: int, steps: int) -> Times:
    """Be one rank: train two steps to warm up, then ``steps`` with a stopwatch."""
    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.testing.probe import rank

    engine = RuntimeEngine.from_recipe(recipe(schedule, pp), rank=rank())
    engine.fit(steps=2)
    watch = Stopwatch(engine.executor)
    engine.fit(steps=2 + steps)
    return attrs.evolve(watch.times, actions=dict(watch.times.actions))


def measure(schedule: str, pp: int, *, steps: int) -> Bubble:
    """Measure one schedule over ``pp`` ranks, and simulate it with the times it took."""
    times = run_ranks(time_rank, pp, schedule, pp, steps, timeout=600, check_collectives=False)
    found = load_plugins()
    actions = found.build(recipe(schedule, pp).schedule).actions(pp, MICROBATCHES)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    simulated = simulate(actions, durations(times)).bubble()
    return Bubble(schedule, pp, idle(times), simulated, cores)


def idle(times: Sequence[Times]) -> float:
    """Return the share of the step, from its beginning to the end of the last rank, in which ranks wait.

    All ranks begin together: the step before ended with the norm of all their gradients.
    """
    steps = len(times[0].steps)
    span = sum(max(rank.steps[step] for rank in times) for step in range(steps))
    busy = sum(sum(map(sum, rank.actions.values())) for rank in times)
    return 1.0 - busy / (span * len(times))


def durations(times: Sequence[Times]) -> Durations:
    """Return the median time of each kind of action in each stage; a whole B where no W follows."""
    medians = {key: median(seconds) for rank in times for key, seconds in rank.actions.items()}
    stages = 1 + max(stage for _, stage in medians)
    forward, backward, weight = ([medians.get((kind, s), 0.0) for s in range(stages)] for kind in "FBW")
    return Durations(forward=forward, backward=backward, weight=weight)
