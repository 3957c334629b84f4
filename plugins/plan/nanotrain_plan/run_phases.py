"""What each phase of a run takes: steps of its first and last batch, simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from nanotrain_core.api import PhaseStretch, PhaseTimeline, Recipe, Registry
from nanotrain_plan.model import count_flops
from nanotrain_plan.phase_stages import PhaseStages
from nanotrain_plan.timing import step_time


@attrs.define(frozen=True, kw_only=True)
class RunPhase:
    """One phase of a run."""

    name: str
    steps: int
    tokens: int
    length: int
    """Tokens of a sequence."""
    flops_per_token: float
    """Of the model, for sequences of that length."""
    sequences: tuple[int, int]
    """Of its first and of its last step."""
    step: tuple[float, float]
    """Seconds of these two."""
    seconds: float
    """Of all its steps."""


def run_phases(recipe: Recipe, registry: Registry, phases: PhaseStages) -> tuple[RunPhase, ...]:
    """Return what the phases of a run take, those that it does not reach left out.

    A step is simulated at the first and the last batch size of a phase; between them its time grows by as
    much for each sequence, since every microbatch takes as long as another.

    Args:
        recipe: with its phases.
        registry: the plugins.
        phases: the stages of each phase.
    """
    timeline = PhaseTimeline(recipe)
    known: dict[int, float] = {}

    def seconds(now: Recipe) -> float:
        stages = phases.of(now)
        if id(stages) not in known:
            known[id(stages)] = step_time(stages, phases.hardware).seconds
        return known[id(stages)]

    found: dict[int, list[PhaseStretch]] = {}
    for stretch in timeline.stretches(recipe.run.steps) if recipe.phase else ():
        found.setdefault(stretch.phase, []).append(stretch)
    return tuple(_phase(timeline, own, registry, seconds) for own in found.values())


def _phase(
    timeline: PhaseTimeline,
    stretches: Sequence[PhaseStretch],
    registry: Registry,
    seconds: Callable[[Recipe], float],
) -> RunPhase:
    number, first, last = stretches[0].phase, stretches[0].sequences, stretches[-1].sequences
    begin, end = (timeline.with_batch(number, size) for size in (first, last))
    one, other = seconds(begin), seconds(end)
    growth = (other - one) / (last - first) if last != first else 0.0
    return RunPhase(
        name=timeline.recipe.phase[number].name or f"phase {number}",
        steps=sum(each.steps for each in stretches),
        tokens=sum(each.tokens for each in stretches),
        length=begin.batch.length,
        flops_per_token=count_flops(begin, registry).model,
        sequences=(first, last),
        step=(one, other),
        seconds=sum(each.steps * (one + growth * (each.sequences - first)) for each in stretches),
    )
