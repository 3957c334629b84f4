"""The pipeline of a run in each of its phases, measured once for microbatches of a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import gt, sub
from typing import Any

import attrs

from nanotrain_core.api import Action, NanotrainError, PhaseTimeline, Recipe, Registry
from nanotrain_core.api.torch import Schedule
from nanotrain_plan.dry.rank import Sort, sorts_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.memory import RankMemory, all_ranks, most_on_host
from nanotrain_plan.stages import Stages, dry_stages


class PhaseStages:
    """Stages by phase. A run cuts them once, and so all phases have those of the first argument.

    Microbatches of another shape are measured by a dry step of their own. Another number of them is a
    schedule of the same actions, unless it has passes that were not measured.
    """

    def __init__(self, stages: Stages, registry: Registry, hardware: Hardware) -> None:
        """``stages``: of the phase with most tokens in a microbatch."""
        self.stages, self.registry, self.hardware = stages, registry, hardware
        self.schedule: Schedule = registry.build(stages.recipe.schedule)
        step = step_of(stages.recipe, stages.data_ranks)
        self._measured = {step.measured_as: stages}
        self._known = {step: stages}

    def of(self, now: Recipe) -> Stages:
        """Return the stages of a phase's recipe, the same object for microbatches alike."""
        step = step_of(now, self.stages.data_ranks)
        if step not in self._known:
            self._known[step] = self._find(now, step)
        return self._known[step]

    def _find(self, now: Recipe, step: Step) -> Stages:
        first, count = self.stages, step.microbatches
        actions = tuple(map(tuple, self.schedule.actions(first.pp, count)))
        sorts = [sorts_of(own, count) for own in actions]
        measured = self._measured.get(step.measured_as)
        if measured is None or not _passes(sorts) <= _passes(measured.sorts):
            measured = dry_stages(
                now, self.registry, first.layout, host=self.hardware.gloo, parts=first.parts
            )
            self._measured[step.measured_as] = measured
        recipe = attrs.evolve(measured.recipe, batch=now.batch)
        return attrs.evolve(measured, recipe=recipe, actions=actions, sorts=sorts, microbatches=count)


@attrs.define(frozen=True)
class Step:
    """What tells a phase's step from others."""

    sequences: int
    """Of a microbatch, on the ranks with most."""
    last: int
    """Of the last microbatch."""
    length: int
    microbatches: int

    @property
    def measured_as(self) -> tuple[int, int, int, int]:
        """Steps for which this is the same have the same microbatches, but for the number of those between.

        The first one, if it is the only one, also has what the last one has: gradient sync.
        """
        return self.sequences, self.last, self.length, min(self.microbatches, 3)


@attrs.define(frozen=True, kw_only=True)
class HighestMemory:
    """The most that a run needs in any phase.

    Smaller microbatches need more if more of them are in flight.
    """

    ranks: list[RankMemory]
    """Of every pipeline rank, in the phase with the highest peak."""
    phase: str
    """Name of that phase; empty if it is the one that is planned."""
    on_host: list[int]
    """Bytes of activations of every pipeline rank that wait in its host's memory, at most, in any phase."""


def highest_memory(
    recipe: Recipe, planned: Stages, of: Callable[[Recipe], Stages], schedule: Schedule
) -> HighestMemory:
    """Return the memory of the phase with the highest peak.

    Args:
        recipe: with its phases.
        planned: the stages of the phase that is planned.
        of: returns the stages of a phase's recipe.
        schedule: of the recipe.
    """
    best, name, on_host = list(all_ranks(planned, recipe)), "", most_on_host(planned)
    dp = planned.data_ranks
    seen = {step_of(planned.recipe, dp)}
    for number, now in (*reached(recipe), *_fullest_of_ramps(recipe, schedule, planned.pp, dp)):
        step = step_of(now, dp)
        if step in seen:
            continue
        seen.add(step)
        stages = of(now)
        found = list(all_ranks(stages, recipe))
        on_host = list(map(max, on_host, most_on_host(stages)))
        if max(rank.peak for rank in found) > max(rank.peak for rank in best):
            best, name = found, name_of(recipe, number)
    return HighestMemory(ranks=best, phase=name, on_host=on_host)


def name_of(recipe: Recipe, number: int) -> str:
    """Return the name of a phase, ``phase 1`` if the recipe has none for it."""
    return recipe.phase[number].name or f"phase {number}"


def planned_phase(recipe: Recipe, now: Recipe) -> str:
    """Return the name of the phase that has the recipe ``now``; empty of a recipe without phases.

    A ramp may end with the batch of the next phase: then it is that phase, all of whose steps have it.
    """
    numbers = [number for number, each in reached(recipe) if each == now]
    ramped = {number for number, _ in PhaseTimeline(recipe).ramps()}
    return name_of(recipe, min(numbers, key=lambda number: number in ramped)) if numbers else ""


def reached(recipe: Recipe) -> Iterator[tuple[int, Recipe]]:
    """Yield each phase that the run reaches, by number, with its recipe in the first and the last step."""
    return PhaseTimeline(recipe).reached_corners(recipe.run.steps)


def _fullest_of_ramps(recipe: Recipe, schedule: Schedule, pp: int, dp: int) -> Iterator[tuple[int, Recipe]]:
    """Yield the batch of each ramp for which a rank holds most sequences, if more than at both of its ends.

    Its last microbatch is taken to be as large as the others: of this shape steps have been measured.
    """
    timeline = PhaseTimeline(recipe)
    ends = {number: now.batch.sequences for number, now in reached(recipe)}
    in_flight = getattr(schedule, "in_flight", None)  # which a schedule may have
    if in_flight is None or pp == 1:
        return
    for number, between in timeline.ramps():
        if number not in ends:
            break
        first, last = between.start - between.step, ends[number]
        sizes = [first, *(size for size in between if min(first, last) < size < max(first, last)), last]
        steps = {size: step_of(timeline.with_batch(number, size), dp) for size in sizes}
        held = {
            size: [step.sequences * count for count in _asked(in_flight, recipe, pp, step.microbatches)]
            for size, step in steps.items()
        }
        at_ends = [max(ends) for ends in zip(held[first], held[last], strict=True)]
        most = max(sizes, key=lambda size: max(map(sub, held[size], at_ends)))
        if any(map(gt, held[most], at_ends)):
            yield number, timeline.with_batch(number, steps[most].sequences * steps[most].microbatches * dp)


def _asked(in_flight: Callable[[int, int], Any], recipe: Recipe, pp: int, count: int) -> Sequence[int]:
    """Return what a schedule says of its microbatches in flight."""
    asked = f"{recipe.schedule.use}: in_flight({pp}, {count})"
    try:
        found = in_flight(pp, count)
    except Exception as problem:
        raise NanotrainError(f"{asked} raised {type(problem).__name__}: {problem}") from problem
    if not isinstance(found, Sequence) or len(found) != pp:
        raise NanotrainError(f"{asked} returned {found!r}; expected a number for each pipeline rank")
    return found


def step_of(now: Recipe, dp: int) -> Step:
    """Return the step of a phase's recipe, whose batch so many data-parallel ranks share."""
    batch = now.batch
    rows, count = -(-batch.sequences // dp), batch.microbatches(dp)
    full = min(batch.microbatch, rows)
    return Step(full, rows - (count - 1) * full, batch.length, count)


def _passes(sorts: Sequence[Mapping[Action, Sort]]) -> set[tuple[str, int]]:
    """Return the kinds of actions of each stage: of few microbatches, some may have no W passes."""
    return {sort[:2] for own in sorts for sort in own.values()}
