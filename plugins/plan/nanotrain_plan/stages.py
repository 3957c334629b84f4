"""Which ranks of a run a plan takes steps of: one for each kind of pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from nanotrain_core.api import Action, Costs, Layout, Part, Recipe, Registry, Selection
from nanotrain_core.api.torch import Model, Run, Schedule, Shard, shard_range
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import RankStep, Sort, dry_rank, dry_recipe, sorts_of, survey
from nanotrain_plan.dry.values import Values
from nanotrain_plan.forks import call_in_forks

#: What tells pipeline ranks apart: of each of their parts, what its layers cost, which ends it has, and
#: which of the first, the last and the other microbatches have W passes.
Kind = tuple[tuple[tuple[float, ...], bool, bool, frozenset[tuple[int, bool]]], ...]


@attrs.define(frozen=True, kw_only=True, eq=False)
class Stages:
    """The pipeline of a run: what each of its ranks does in a step."""

    recipe: Recipe
    layout: Layout
    parts: tuple[Part, ...]
    costs: Costs
    actions: tuple[tuple[Action, ...], ...]
    """Of every pipeline rank."""
    microbatches: int
    sorts: Sequence[Mapping[Action, Sort]]
    """Of every pipeline rank's actions."""
    steps: Mapping[int, RankStep]
    """Of one rank of each kind, by pipeline rank."""
    like: Sequence[int]
    """For each pipeline rank the one in :attr:`steps` that is of its kind."""
    compiled: bool
    """Whether the run compiles its layers, which a dry run of them does not."""
    captured: bool
    """Whether the run replays its forward and backward passes as a CUDA graph."""
    _stages: Sequence[list[int]] = attrs.field(init=False)
    """Of every pipeline rank, asked for once for each of its actions."""

    @_stages.default
    def _find_stages(self) -> Sequence[list[int]]:
        return [[s for s, part in enumerate(self.parts) if part.rank == own] for own in range(self.pp)]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.layout.size(*self.layout.row_dims)

    @property
    def tokens(self) -> int:
        """Tokens of a step if all ranks had as many as those that it was taken of, which have most."""
        batch, layout = self.recipe.batch, self.layout
        dp, parts = self.data_ranks, layout.size(*layout.sequence_dims)
        return dp * -(-batch.sequences // dp) * parts * -(-batch.length // parts)

    def step_of(self, pp_rank: int) -> RankStep:
        """Return what was measured for a pipeline rank, on it or on one of its kind."""
        return self.steps[self.like[pp_rank]]

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds, in the order of the model."""
        return self._stages[pp_rank]

    def kinds(self) -> dict[int, list[int]]:
        """Return the pipeline ranks of each kind, by the one in :attr:`steps`; the kind of rank 0 first."""
        found: dict[int, list[int]] = {}
        for pp_rank, measured in enumerate(self.like):
            found.setdefault(measured, []).append(pp_rank)
        return found

    def alike(self) -> dict[int, list[int]]:
        """Return the stages by the measured stage that stands for them."""
        found: dict[int, list[int]] = {}
        for stage, part in enumerate(self.parts):
            found.setdefault(self.as_measured(part.rank, stage), []).append(stage)
        return found

    def phase(self, pp_rank: int, action: Action) -> Phase:
        """Return what was measured for an action of a pipeline rank."""
        return self.phase_of(pp_rank, self.sorts[pp_rank][action])

    def phase_of(self, pp_rank: int, sort: Sort) -> Phase:
        """Return what was measured for the actions of a sort."""
        kind, stage, place, split = sort
        return self.step_of(pp_rank).phase((kind, self.as_measured(pp_rank, stage), place, split))

    def as_measured(self, pp_rank: int, stage: int) -> int:
        """Return the stage of the measured rank that stands for one of ``pp_rank``."""
        return self.stages_of(self.like[pp_rank])[self.stages_of(pp_rank).index(stage)]


def compiles_layers(recipe: Recipe, *, host: bool) -> bool:
    """Return whether a run on planned devices compiles its layers: on GPUs, unless the recipe says no."""
    return recipe.run.compile is not False and not host


def dry_stages(
    recipe: Recipe,
    registry: Any,
    layout: Layout,
    *,
    host: bool,
    look: Callable[[Run], Any] | None = None,
    parts: tuple[Part, ...] | None = None,
    processes: int = 1,
) -> Stages:
    """Take a step of one rank of each kind: where ranks have different numbers of tokens, of those with most.

    Args:
        recipe: checked, of the world size to plan.
        registry: the plugins.
        layout: of that many ranks.
        host: whether ranks are CPUs, which exchange tensors through gloo.
        look: of :func:`~nanotrain_plan.dry.rank.dry_rank`, for each rank whose step is taken.
        parts: the model's pipeline stages, if the schedule is not to cut them for this recipe.
        processes: that take steps at the same time, at most. More than one goes with no ``look``.
    """
    if parts is not None:
        registry = ReplacedSchedule(registry, CutAlready(registry.build(recipe.schedule), parts))
    recipe_of_run, recipe = recipe, dry_recipe(recipe, registry, host=host)
    pp = layout.degree("pp")
    model: Model = registry.build(recipe.model)
    schedule: Schedule = registry.build(recipe.schedule)
    costs = model.flops(recipe.batch.length)
    parts = tuple(schedule.parts(costs, pp))
    microbatches = recipe.batch.microbatches(layout.size(*layout.row_dims))
    ranks = pipeline_of_most_tokens(layout, pp, recipe.batch.length, recipe.batch.sequences)
    told = survey(recipe, registry, ranks, host=host) if pp > 1 else []
    kinds: dict[Kind, int] = {}
    like = []
    actions = tuple(map(tuple, schedule.actions(pp, microbatches)))
    sorts = [sorts_of(own, microbatches) for own in actions]
    for number in range(len(ranks)):
        own = {stage: part for stage, part in enumerate(parts) if part.rank == number}
        like.append(kinds.setdefault(kind_of(own, sorts[number], costs), number))
    values = Values()

    def take_step(number: int) -> RankStep:
        return dry_rank(recipe, registry, layout, ranks[number], told, values, host=host, look=look)

    first, *others = kinds.values()
    steps = {first: take_step(first)}  # before the others: it notes what stages send, and what operators make
    calls = [partial(take_step, number) for number in others]
    steps |= zip(others, call_in_forks(calls, processes), strict=True)
    return Stages(
        recipe=recipe,
        layout=layout,
        parts=parts,
        costs=costs,
        actions=actions,
        sorts=sorts,
        microbatches=microbatches,
        steps=steps,
        like=like,
        compiled=compiles_layers(recipe_of_run, host=host),
        captured=recipe_of_run.run.cuda_graphs,
    )


def pipeline_of_most_tokens(layout: Layout, pp: int, length: int, sequences: int | None = None) -> list[int]:
    """Return ranks, one for each of ``pp`` pipeline ranks, with the most tokens of a batch.

    Where data parallelism splits ``sequences`` (None: as many to each) or context parallelism the
    ``length`` tokens of each, parts may differ by one: the largest takes the most memory and time. Of several
    such pipelines it is the first.
    """
    shared, split = layout.sequence_dims, layout.row_dims
    dp = layout.size(*split)

    def tokens(rank: int) -> tuple[int, int]:
        rows = Shard(layout.coordinate(rank, *split), dp).rows(dp if sequences is None else sequences)
        first, end = shard_range(length, layout.coordinate(rank, *shared), layout.size(*shared))
        return len(rows), end - first

    start = max(layout.ranks(0, *split, *shared), key=tokens)
    stride = layout.view(["pp"]).stride("pp") if pp > 1 else 0
    return [start + number * stride for number in range(pp)]


class ReplacedSchedule:
    """The plugins, with another schedule in place of the recipe's."""

    def __init__(self, registry: Registry, schedule: Any) -> None:
        self._registry, self._schedule = registry, schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def build(self, selection: Selection) -> Any:
        """Return the component, or that schedule."""
        return self._schedule if selection.kind == "schedule" else self._registry.build(selection)


class CutAlready:
    """A schedule whose pipeline stages were cut before."""

    def __init__(self, schedule: Schedule, parts: tuple[Part, ...]) -> None:
        self._schedule, self._parts = schedule, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages, whatever layers cost now."""
        return self._parts


def kind_of(parts: Mapping[int, Part], sorts: Mapping[Action, Sort], costs: Costs) -> Kind:
    """Return what a pipeline rank of these parts and actions has in common with others."""
    halves = {stage: frozenset(s[2:] for s in sorts.values() if s[:2] == ("B", stage)) for stage in parts}
    return tuple(
        (tuple(costs.layers[p.first : p.last]), p.has_embedding, p.has_head, halves[stage])
        for stage, p in parts.items()
    )
