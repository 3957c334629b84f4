"""What each phase of a run takes: steps of its first and last batch, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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

    A step is simulated at the first and the last batch size of a phase, and at the size between them with
    which a rank has one full microbatch. Up to there microbatches grow, and after it their number: between
    these sizes a step's time grows by as much for each sequence.

    Args:
        recipe: with its phases.
        registry: the plugins.
        phases: the stages of each phase.
    """
    timeline = PhaseTimeline(recipe)
    known: dict[int, float] = {}
    dp = phases.stages.layout.size("dp")

    def seconds(now: Recipe) -> float:
        stages = phases.of(now)
        if id(stages) not in known:
            known[id(stages)] = step_time(stages, phases.hardware).seconds
        return known[id(stages)]

    own = _by_phase(timeline) if recipe.phase else []
    return tuple(_phase(timeline, stretches, registry, seconds, dp) for stretches in own)


def run_seconds(recipe: Recipe, dp: int, *seconds: Callable[[Recipe], float]) -> list[float]:
    """Return what the steps of a run take together, as those of :func:`run_phases`, by each of ``seconds``.

    Args:
        recipe: with its phases, or without any.
        dp: data-parallel ranks.
        seconds: functions of a phase's recipe, of one of its steps.
    """
    timeline = PhaseTimeline(recipe)
    phases = _by_phase(timeline)
    return [sum(_of_steps(timeline, phase, each, dp)[1] for phase in phases) for each in seconds]


def _by_phase(timeline: PhaseTimeline) -> list[list[PhaseStretch]]:
    """Return the steps of each phase that the run reaches."""
    found: dict[int, list[PhaseStretch]] = {}
    for stretch in timeline.stretches(timeline.recipe.run.steps):
        found.setdefault(stretch.phase, []).append(stretch)
    return list(found.values())


def _of_steps(
    timeline: PhaseTimeline,
    stretches: Sequence[PhaseStretch],
    seconds: Callable[[Recipe], float],
    dp: int,
) -> tuple[tuple[float, float], float]:
    """Return the seconds of a phase's first and last step, and of all its steps."""
    number, first, last = stretches[0].phase, stretches[0].sequences, stretches[-1].sequences
    sizes = {first, last}
    full = timeline.with_batch(number, first).batch.microbatch * dp
    if min(sizes) < full < max(sizes):
        sizes.add(full)
    known = {size: seconds(timeline.with_batch(number, size)) for size in sorted(sizes)}
    total = sum(each.steps * _between(known, each.sequences) for each in stretches)
    return (known[first], known[last]), total


def _phase(
    timeline: PhaseTimeline,
    stretches: Sequence[PhaseStretch],
    registry: Registry,
    seconds: Callable[[Recipe], float],
    dp: int,
) -> RunPhase:
    number, first, last = stretches[0].phase, stretches[0].sequences, stretches[-1].sequences
    begin = timeline.with_batch(number, first)
    step, total = _of_steps(timeline, stretches, seconds, dp)
    return RunPhase(
        name=timeline.recipe.phase[number].name or f"phase {number}",
        steps=sum(each.steps for each in stretches),
        tokens=sum(each.tokens for each in stretches),
        length=begin.batch.length,
        flops_per_token=count_flops(begin, registry).model,
        sequences=(first, last),
        step=step,
        seconds=total,
    )


def _between(known: Mapping[int, float], size: int) -> float:
    """Return the value at ``size`` on the lines through those that are known."""
    low, high = max(each for each in known if each <= size), min(each for each in known if each >= size)
    share = (size - low) / (high - low) if high > low else 0.0
    return known[low] + share * (known[high] - known[low])
