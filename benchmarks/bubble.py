"""Whether a pipeline stands idle as long as the simulation of its schedule says, on equal stages.

Each step is simulated with the time that each of its actions took, without waiting: what the simulation
leaves out is messages, and what it finds is how long ranks must wait in this schedule for such actions.
Beside it stands the simulation with the median time of each stage's actions, which is that of a machine on
which equal actions take equal times. Embedding and head have few tokens, so that stages are equal.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from benchmarks.cases import RECIPE
from benchmarks.report import verdict
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import Durations, simulate
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.run.host_processors import usable_processors
from nanotrain_core.testing import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v")
MICROBATCHES = 8


@attrs.define(frozen=True)
class Bubble:
    """Idle share of all ranks together, median over steps, and what simulations of the same steps say."""

    KIND = "bubbles"
    TITLE = f"Idle share of a pipeline of equal stages, {MICROBATCHES} microbatches."
    HEADER = ("schedule", "ranks", "idle, measured", "simulated", "with median times", "")

    schedule: str
    pp: int
    measured: float
    simulated: float
    smooth: float
    """Simulated with median times."""
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
        shares = [f"{share:.1%}" for share in (self.measured, self.simulated, self.smooth)]
        last = verdict(self.passed) if self.counts else f"ranks share {self.cores} cores"
        return [self.schedule, str(self.pp), *shares, last]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


@attrs.define
class Step:
    """What one rank measured in one step, in seconds."""

    actions: dict[Action, float] = attrs.field(factory=dict)
    """Of each action with all that the host does for it, without waiting for other stages."""
    seconds: float = 0.0
    """Of the whole list."""


Steps = list[Step]


@attrs.define(frozen=True)
class Each(Durations):
    """The time of every single action."""

    times: Mapping[Action, float]

    def of(self, action: Action, *, split: bool) -> float:
        """Return it."""
        return self.times[action]


class Stopwatch:
    """Times the actions of an executor, and its steps."""

    def __init__(self, executor: Any) -> None:
        self.p2p = executor.p2p
        self.steps: Steps = []
        self._execute, self._run = executor._execute, executor.run
        executor._execute, executor.run = self.execute, self.run

    def execute(self, action: Action) -> None:
        """Run one action."""
        self._execute(action)
        self.steps[-1].actions[action] = self._lap()

    def run(self, *arguments: Any) -> Any:
        """Run one step."""
        self.steps.append(Step())
        began = time.perf_counter()
        self._before = began - self.p2p.waited
        losses = self._run(*arguments)
        last = next(reversed(self.steps[-1].actions))
        self.steps[-1].actions[last] += self._lap()
        self.steps[-1].seconds = time.perf_counter() - began
        return losses

    def _lap(self) -> float:
        """Return the seconds since this was last called in which the host did not wait."""
        before, self._before = self._before, time.perf_counter() - self.p2p.waited
        return self._before - before


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


def time_rank(schedule: str, pp: int, steps: int) -> Steps:
    """Be one rank: train two steps to warm up, then ``steps`` with a stopwatch."""
    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.testing.probe import rank

    engine = RuntimeEngine.from_recipe(recipe(schedule, pp), rank=rank())
    engine.fit(steps=2)
    watch = Stopwatch(engine.executor)
    engine.fit(steps=2 + steps)
    return watch.steps


def measure(schedule: str, pp: int, *, steps: int) -> Bubble:
    """Measure one schedule over ``pp`` ranks, and simulate it with the times it took."""
    ranks = run_ranks(time_rank, pp, schedule, pp, steps, timeout=600, check_collectives=False)
    found = load_plugins()
    actions = found.build(recipe(schedule, pp).schedule).actions(pp, MICROBATCHES)
    together = list(zip(*ranks, strict=True))
    simulated = median(simulate(actions, Each(times=merged(step))).bubble() for step in together)
    smooth = simulate(actions, medians(ranks)).bubble()
    return Bubble(schedule, pp, median(map(idle, together)), simulated, smooth, usable_processors())


def idle(step: Sequence[Step]) -> float:
    """Return the share of a step, from its beginning to the end of the last rank, in which ranks wait.

    All ranks begin together: the step before ended with the norm of all their gradients.
    """
    span = max(rank.seconds for rank in step)
    return 1.0 - sum(merged(step).values()) / (span * len(step))


def merged(step: Sequence[Step]) -> dict[Action, float]:
    """Return the times of all ranks' actions."""
    return {action: seconds for rank in step for action, seconds in rank.actions.items()}


def medians(ranks: Sequence[Steps]) -> Durations:
    """Return the median time of each kind of action in each stage; a whole B where no W follows."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in (step for steps in ranks for step in steps):
        for action, seconds in step.actions.items():
            found[action.kind, action.stage].append(seconds)
    stages = 1 + max(stage for _, stage in found)
    forward, backward, weight = (
        [median(found.get((kind, s), [0.0])) for s in range(stages)] for kind in "FBW"
    )
    return Durations(forward=forward, backward=backward, weight=weight)
