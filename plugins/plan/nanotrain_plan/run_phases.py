"""What each phase of a run takes: the step of the largest batch, simulated with fewer microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from nanotrain_core.api import PhaseStretch, PhaseTimeline, Recipe, Registry
from nanotrain_core.api.torch import Schedule
from nanotrain_plan.dry.rank import sorts_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.stages import Stages
from nanotrain_plan.timing import step_time


@attrs.define(frozen=True, kw_only=True)
class RunPhase:
    """One phase of a run."""

    name: str
    steps: int
    tokens: int
    sequences: tuple[int, int]
    """Of its first and of its last step."""
    step: tuple[float, float]
    """Seconds of these two."""
    seconds: float
    """Of all its steps."""


def run_phases(
    recipe: Recipe, registry: Registry, stages: Stages, hardware: Hardware
) -> tuple[RunPhase, ...]:
    """Return what the phases of a run take, those that it does not reach left out.

    A step is simulated at the first and the last batch size of a phase; between them its time grows by as
    much for each sequence, since every microbatch takes as long as another.

    Args:
        recipe: with its phases.
        registry: the plugins.
        stages: of the recipe's largest batch.
        hardware: to run on.
    """
    schedule: Schedule = registry.build(recipe.schedule)
    known: dict[int, float] = {}

    def seconds(sequences: int) -> float:
        batch = attrs.evolve(recipe.batch, sequences=sequences)
        count = batch.microbatches(stages.layout.size("dp"))
        if count not in known:
            actions = tuple(map(tuple, schedule.actions(stages.pp, count)))
            sorts = [sorts_of(own, count) for own in actions]
            shorter = attrs.evolve(stages, actions=actions, sorts=sorts, microbatches=count)
            known[count] = step_time(shorter, hardware).seconds
        return known[count]

    found: dict[int, list[PhaseStretch]] = {}
    for stretch in PhaseTimeline(recipe).stretches(recipe.run.steps):
        found.setdefault(stretch.phase, []).append(stretch)
    return tuple(
        _phase(recipe.phase[number].name or f"phase {number}", own, recipe.batch.length, seconds)
        for number, own in (found.items() if recipe.phase else ())
    )


def _phase(
    name: str, stretches: Sequence[PhaseStretch], length: int, seconds: Callable[[int], float]
) -> RunPhase:
    first, last = stretches[0].sequences, stretches[-1].sequences
    one, other = seconds(first), seconds(last)
    growth = (other - one) / (last - first) if last != first else 0.0
    return RunPhase(
        name=name,
        steps=sum(each.steps for each in stretches),
        tokens=sum(each.steps * each.sequences for each in stretches) * length,
        sequences=(first, last),
        step=(one, other),
        seconds=sum(each.steps * (one + growth * (each.sequences - first)) for each in stretches),
    )
