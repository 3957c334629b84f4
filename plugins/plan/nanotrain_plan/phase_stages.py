"""The pipeline of a run in each of its phases, measured once for microbatches of a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from nanotrain_core.api import PhaseTimeline, Recipe, Registry
from nanotrain_core.api.torch import Schedule
from nanotrain_plan.dry.rank import sorts_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.memory import RankMemory, all_ranks, most_on_host
from nanotrain_plan.stages import Stages, dry_stages


class PhaseStages:
    """Stages by phase. A run cuts them once, and so all phases have those of the first argument.

    Microbatches of another shape are measured by a dry step of their own. Another number of them is a
    schedule of the same actions.
    """

    def __init__(self, stages: Stages, registry: Registry, hardware: Hardware) -> None:
        """``stages``: of the phase with most tokens in a microbatch."""
        self.stages, self.registry, self.hardware = stages, registry, hardware
        self.schedule: Schedule = registry.build(stages.recipe.schedule)
        self._measured = {_microbatch(stages.recipe): stages}
        self._known = {_step_of(stages.recipe, stages): stages}

    def of(self, now: Recipe) -> Stages:
        """Return the stages of a phase's recipe, the same object for microbatches alike."""
        first = self.stages
        step = shape, count = _step_of(now, first)
        if shape not in self._measured:
            self._measured[shape] = dry_stages(
                now, self.registry, first.layout, host=self.hardware.gloo, parts=first.parts
            )
        if step not in self._known:
            actions = tuple(map(tuple, self.schedule.actions(first.pp, count)))
            sorts = [sorts_of(own, count) for own in actions]
            self._known[step] = attrs.evolve(
                self._measured[shape], actions=actions, sorts=sorts, microbatches=count
            )
        return self._known[step]


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


def highest_memory(recipe: Recipe, planned: Stages, of: Callable[[Recipe], Stages]) -> HighestMemory:
    """Return the memory of the phase with the highest peak.

    Args:
        recipe: with its phases.
        planned: the stages of the phase that is planned.
        of: returns the stages of a phase's recipe.
    """
    best, name, on_host = list(all_ranks(planned, recipe)), "", most_on_host(planned)
    seen = {_step_of(planned.recipe, planned)}
    for number, now in reached(recipe):
        if _step_of(now, planned) in seen:
            continue
        seen.add(_step_of(now, planned))
        stages = of(now)
        found = list(all_ranks(stages, recipe))
        on_host = list(map(max, on_host, most_on_host(stages)))
        if max(rank.peak for rank in found) > max(rank.peak for rank in best):
            best, name = found, recipe.phase[number].name or f"phase {number}"
    return HighestMemory(ranks=best, phase=name, on_host=on_host)


def reached(recipe: Recipe) -> Iterator[tuple[int, Recipe]]:
    """Yield each phase that the run reaches, by number, with its recipe at the beginning and the end."""
    timeline = PhaseTimeline(recipe)
    last = timeline.reached(recipe.run.steps) if recipe.phase else 0
    yield from ((number, now) for number, now in timeline.corners() if number < last)


def _step_of(now: Recipe, stages: Stages) -> tuple[tuple[int, int], int]:
    """Return what tells a phase's step from others: the shape and the number of its microbatches."""
    return _microbatch(now), now.batch.microbatches(stages.layout.size("dp"))


def _microbatch(recipe: Recipe) -> tuple[int, int]:
    return recipe.batch.microbatch, recipe.batch.length
