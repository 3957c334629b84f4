"""What an explanation is read from: a recipe, a dry step of it, and who its components are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs

from nanotrain_core.api import Layout, PhaseTimeline, Recipe, Registry, Timeline, simulate
from nanotrain_plan.budget import offloads_state
from nanotrain_plan.explain.communication import Exchanged, exchanges
from nanotrain_plan.explain.composed_rank import HeldParameter, Looked, Neighbors, look
from nanotrain_plan.explain.owners import Owners
from nanotrain_plan.memory import RankMemory, kept_by_forward, rank_memory
from nanotrain_plan.number_format import starred
from nanotrain_plan.stages import Stages, dry_stages


@attrs.define(frozen=True, kw_only=True, eq=False)
class Alike:
    """Parameters that differ in the number of their layer alone."""

    name: str
    """With a star for the number."""
    first: HeldParameter
    number: int
    splits: dict[int, list[str]]
    """Axis -> mesh dimensions that it is split over."""


@attrs.define(frozen=True, kw_only=True, eq=False, slots=False)
class Subject:
    """The inputs of an explanation: a recipe, a dry step of it, and the components that it selects."""

    recipe: Recipe
    """Without phases: with the values of the one that has the largest batch, as a plan takes it."""
    phases: int
    """How many the recipe has."""
    registry: Registry
    layout: Layout
    host: bool
    """Whether ranks are CPUs."""
    stages: Stages
    owners: Owners

    @classmethod
    def of(cls, recipe: Recipe, registry: Registry, layout: Layout, *, host: bool) -> Subject:
        """Take a dry step of a checked recipe."""
        phases, recipe = len(recipe.phase), PhaseTimeline(recipe).largest()
        stages = dry_stages(recipe, registry, layout, host=host, look=look)
        return cls(
            recipe=recipe,
            phases=phases,
            registry=registry,
            layout=layout,
            host=host,
            stages=stages,
            owners=Owners(recipe, registry),
        )

    @cached_property
    def told(self) -> Sequence[int]:
        """Pipeline ranks that are told one by one: the first of each kind."""
        return sorted(self.stages.steps)

    def rank(self, pp_rank: int) -> int:
        """Return the global rank whose step was taken, of a pipeline rank that is told."""
        return self.stages.steps[pp_rank].rank

    def looked(self, pp_rank: int) -> Looked:
        """Return what such a rank holds."""
        found: Looked = self.stages.steps[pp_rank].looked
        return found

    @cached_property
    def neighbors(self) -> Neighbors:
        """Other ranks' placements."""
        return Neighbors(self.recipe, self.registry, self.layout, host=self.host)

    @cached_property
    def _alike(self) -> dict[int, list[Alike]]:
        return {}

    def alike(self, pp_rank: int) -> list[Alike]:
        """Return a rank's parameters, those of layers that are alike as one."""
        if pp_rank not in self._alike:
            parameters = self.looked(pp_rank).parameters
            splits = self.neighbors.splits(self.rank(pp_rank), parameters)
            groups: dict[object, list[HeldParameter]] = {}
            for each in parameters:
                p = each.placement
                key = (starred(p.name), p.shape, p.offset, p.sharded, p.summed, p.same, p.stages)
                groups.setdefault((*key, each.dtype, each.trained), []).append(each)
            self._alike[pp_rank] = [
                Alike(
                    name=starred(group[0].placement.name) if len(group) > 1 else group[0].placement.name,
                    first=group[0],
                    number=len(group),
                    splits=splits.get(group[0].placement.name, {}),
                )
                for group in groups.values()
            ]
        return self._alike[pp_rank]

    @cached_property
    def _exchanges(self) -> dict[int, list[Exchanged]]:
        return {pp_rank: exchanges(self.stages, pp_rank, self.owners) for pp_rank in self.told}

    def exchanges(self, pp_rank: int) -> list[Exchanged]:
        """Return a rank's collectives of a step."""
        return self._exchanges[pp_rank]

    def described(self, kind: str) -> Sequence[str]:
        """Return what a composed run says of a component of that kind, in lines."""
        return self.stages.steps[self.told[0]].descriptions.get(kind, ())

    @property
    def offloads_state(self) -> bool:
        """Whether masters and optimizer state leave the device; on a CPU there is nowhere else."""
        return offloads_state(self.recipe) and not self.host

    def memory(self, pp_rank: int) -> RankMemory:
        """Return the memory of a rank's device over the step."""
        return rank_memory(self.stages, pp_rank, offloaded=self.offloads_state)

    def kept_for_backward(self, pp_rank: int) -> int:
        """Return the bytes that a microbatch's forward passes leave on a rank's device, of all its stages."""
        stages = self.stages.stages_of(pp_rank)
        return sum(storage.bytes for s in stages for storage in kept_by_forward(self.stages, pp_rank, s))

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule on paper: a forward takes one unit of time, a whole backward two."""
        return simulate(self.stages.actions)
