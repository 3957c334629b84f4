"""What each phase of a run takes: steps of its first and last batch, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from nanotrain_core.api import Layout, PhaseStretch, PhaseTimeline, Recipe, Registry
from nanotrain_plan.comms import CollectiveTime
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.model import count_flops
from nanotrain_plan.phase_stages import PhaseStages, name_of
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


def run_phases(
    recipe: Recipe,
    registry: Registry,
    phases: PhaseStages,
    collectives: Callable[[Phase], CollectiveTime] | None = None,
) -> tuple[RunPhase, ...]:
    """Return what the phases of a run take, those that it does not reach left out.

    A step is simulated at the first and the last batch size of a phase, and at sizes between them: that with
    which a rank has one full microbatch (up to there microbatches grow, and after it their number), and those
    with as many microbatches as pipeline ranks, and twice as many, from which on a schedule is in its steady
    state. Between these sizes a step's time grows by as much for each sequence.

    Args:
        recipe: with its phases.
        registry: the plugins.
        phases: the stages of each phase.
        collectives: see :func:`~nanotrain_plan.timing.step_time`.
    """
    timeline = PhaseTimeline(recipe)
    known: dict[int, float] = {}
    layout = phases.stages.layout

    def seconds(now: Recipe) -> float:
        stages = phases.of(now)
        if id(stages) not in known:
            known[id(stages)] = step_time(stages, phases.hardware, collectives).seconds
        return known[id(stages)]

    own = _by_phase(timeline) if recipe.phase else []
    return tuple(_phase(timeline, stretches, registry, seconds, layout) for stretches in own)


def run_seconds(recipe: Recipe, layout: Layout, *seconds: Callable[[Recipe], float]) -> list[float]:
    """Return what the steps of a run take together, by each of ``seconds``.

    Fewer sizes of a ramp are looked at than by :func:`run_phases`: not those of a pipeline.

    Args:
        recipe: with its phases, or without any.
        layout: of its ranks.
        seconds: functions of a phase's recipe, of one of its steps.
    """
    timeline = PhaseTimeline(recipe)
    phases, full = _by_phase(timeline), [layout.size(*layout.row_dims)]
    return [sum(_of_steps(timeline, phase, each, full)[1] for phase in phases) for each in seconds]


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
    between: Sequence[int],
) -> tuple[tuple[float, float], float]:
    """Return the seconds of a phase's first and last step, and of all its steps.

    ``between``: numbers of microbatches of a batch, on all ranks, to look at if they are between its ends.
    """
    number, first, last = stretches[0].phase, stretches[0].sequences, stretches[-1].sequences
    microbatch = timeline.with_batch(number, first).batch.microbatch
    inside = (count * microbatch for count in between)
    sizes = {first, last, *(size for size in inside if min(first, last) < size < max(first, last))}
    known = {size: seconds(timeline.with_batch(number, size)) for size in sorted(sizes)}
    total = sum(each.steps * _between(known, each.sequences) for each in stretches)
    return (known[first], known[last]), total


def _phase(
    timeline: PhaseTimeline,
    stretches: Sequence[PhaseStretch],
    registry: Registry,
    seconds: Callable[[Recipe], float],
    layout: Layout,
) -> RunPhase:
    number, first, last = stretches[0].phase, stretches[0].sequences, stretches[-1].sequences
    begin = timeline.with_batch(number, first)
    dp, pp = layout.size(*layout.row_dims), layout.degree("pp")
    step, total = _of_steps(timeline, stretches, seconds, [dp, pp * dp, 2 * pp * dp] if pp > 1 else [dp])
    return RunPhase(
        name=name_of(timeline.recipe, number),
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
