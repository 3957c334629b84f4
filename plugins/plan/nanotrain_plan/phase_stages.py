"""The pipeline of a run in each of its phases, measured once for microbatches of a shape."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from nanotrain_core.api import PhaseTimeline, Recipe, Registry
from nanotrain_core.api.torch import Schedule
from nanotrain_plan.dry.rank import sorts_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.memory import RankMemory, all_ranks
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
        self._known = {(_microbatch(stages.recipe), stages.microbatches): stages}

    def of(self, now: Recipe) -> Stages:
        """Return the stages of a phase's recipe, the same object for microbatches alike."""
        first = self.stages
        shape, count = _microbatch(now), now.batch.microbatches(first.layout.size("dp"))
        if shape not in self._measured:
            self._measured[shape] = dry_stages(
                now, self.registry, first.layout, host=self.hardware.gloo, parts=first.parts
            )
        if (shape, count) not in self._known:
            actions = tuple(map(tuple, self.schedule.actions(first.pp, count)))
            sorts = [sorts_of(own, count) for own in actions]
            self._known[shape, count] = attrs.evolve(
                self._measured[shape], actions=actions, sorts=sorts, microbatches=count
            )
        return self._known[shape, count]


def highest_memory(recipe: Recipe, phases: PhaseStages) -> tuple[list[RankMemory], str]:
    """Return the memory of every pipeline rank in the phase with the highest peak, and the phase's name.

    The name is empty if it is the phase that ``phases`` was made of: smaller microbatches need more if more
    of them are in flight.
    """
    best, name = list(all_ranks(phases.stages, recipe)), ""
    for number, now in reached(recipe):
        found = list(all_ranks(phases.of(now), recipe))
        if max(rank.peak for rank in found) > max(rank.peak for rank in best):
            best, name = found, recipe.phase[number].name or f"phase {number}"
    return best, name


def reached(recipe: Recipe) -> Iterator[tuple[int, Recipe]]:
    """Yield each phase that the run reaches, by number, with its recipe at the beginning and the end."""
    timeline = PhaseTimeline(recipe)
    last = timeline.reached(recipe.run.steps) if recipe.phase else 0
    yield from ((number, now) for number, now in timeline.corners() if number < last)


def _microbatch(recipe: Recipe) -> tuple[int, int]:
    return recipe.batch.microbatch, recipe.batch.length
