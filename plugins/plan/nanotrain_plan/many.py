"""Steps of many ranks of which some are slow at times: the schedule, simulated with times that are drawn.

In each step a rank is slow with some probability, by itself. Ranks that exchange tensors within an action,
those of a stage that share layers or experts, wait for their slowest; stages wait for one another as the
schedule has it; all pipelines wait for the slowest before the update. The same actions run in any case, so
that many steps are simulated at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from nanotrain_core.api import Action, Durations, dependencies, simulate
from nanotrain_plan.goodput import percentile

#: Numbers that are drawn at once.
MOST_DRAWN = 4_000_000


@attrs.define(frozen=True, kw_only=True)
class Stragglers:
    """How often a rank is slow, and how much."""

    share: float
    """Probability that a rank is slow in a step."""
    factor: float
    """Of its time then."""


@attrs.define(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step."""

    ideal: float
    """If no rank is slow."""
    mean: float
    p50: float
    p95: float
    p99: float


def step_times(
    actions: Sequence[Sequence[Action]],
    durations: Durations,
    after: float,
    *,
    pipelines: int,
    waiting: int,
    stragglers: Stragglers,
    steps: int,
    seed: int,
) -> StepTimes:
    """Draw the times of many steps.

    Args:
        actions: of every pipeline rank.
        durations: of them.
        after: seconds that follow the actions, on every rank.
        pipelines: that run side by side, each as wide as its ranks wait for one another within actions.
        waiting: ranks of one stage that wait for one another within actions.
        stragglers: which ranks are slow.
        steps: how many to draw.
        seed: of the draws.
    """
    ideal = simulate(actions, durations).makespan + after
    draw = torch.Generator().manual_seed(seed)
    pp = len(actions)
    slow_group = 1 - (1 - stragglers.share) ** waiting
    at_once = max(1, MOST_DRAWN // (pipelines * pp))
    found: list[float] = []
    while len(found) < steps:
        count = min(at_once, steps - len(found))
        slow = torch.rand(count, pipelines, pp, generator=draw, dtype=torch.float64) < slow_group
        patterns, which = torch.unique(slow.view(-1, pp), dim=0, return_inverse=True)
        factors = 1.0 + (stragglers.factor - 1.0) * patterns.to(torch.float64)
        times = makespans(actions, durations, factors) + after * factors.amax(dim=1)
        found += times[which].view(count, pipelines).amax(dim=1).tolist()
    return StepTimes(
        ideal=ideal,
        mean=sum(found) / len(found),
        p50=percentile(found, 0.50),
        p95=percentile(found, 0.95),
        p99=percentile(found, 0.99),
    )


def makespans(
    actions: Sequence[Sequence[Action]], durations: Durations, factors: torch.Tensor
) -> torch.Tensor:
    """Return the end of the last action [n], where each rank takes ``factors`` [n, ranks] of its time.

    As :func:`~nanotrain_core.pipeline.simulator.simulate`, of many such runs at once.
    """
    final = max((action.stage for own in actions for action in own), default=0)
    waiting = [list(reversed(own)) for own in actions]
    split = {(a.stage, a.microbatch) for own in actions for a in own if a.kind == "W"}
    clock = [torch.zeros(len(factors), dtype=factors.dtype) for _ in actions]
    done: dict[Action, tuple[torch.Tensor, int]] = {}
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue and all(need in done for need in dependencies(queue[-1], final)):
                action = queue.pop()
                start = clock[rank]
                for need in dependencies(action, final):
                    end, source = done[need]
                    if source != rank:
                        start = torch.maximum(start, end + durations.p2p)
                time = durations.of(action, split=(action.stage, action.microbatch) in split)
                clock[rank] = start + time * factors[:, rank]
                done[action] = clock[rank], rank
    return torch.stack(clock).amax(dim=0)
