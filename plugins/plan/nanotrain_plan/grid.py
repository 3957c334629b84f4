"""The layouts that a sweep compares: degrees, microbatches, recomputation, optimizers and schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import log2

import attrs

from nanotrain_core.api import Recipe, Registry
from nanotrain_plan.advice import (
    find,
    with_component,
    with_config,
    with_degree,
    with_microbatch,
    with_recompute,
    with_zero,
)
from nanotrain_plan.plan import Plan

#: Schedules of a pipeline that are compared where they are installed.
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v")

#: From that which computes least to that which keeps least.
GRANULARITIES = (None, "selective", "full")

MICROBATCHES = (1, 2, 4, 8)

#: Bytes of a gradient, of every precision that is not float64.
GRADIENT = 4


@attrs.define(frozen=True)
class Family:
    """Layouts whose layers do the same: they differ in pipeline, recomputation and schedule."""

    recipe: Recipe
    pipelines: tuple[int, ...]
    """Pipeline ranks, the number nearest to the recipe's first."""
    most: int | None = None
    """The first layouts that are compared; None: all."""


def families(plan: Plan, registry: Registry, refused: Counter[str]) -> list[Family]:
    """Return the grid, what is nearest to the recipe first; count what is out of the question, by reason."""
    recipe = plan.recipe
    found: list[tuple[float, int, Family]] = []
    for number, (change, distance) in enumerate(_changes(plan, registry)):
        other = change(recipe)
        pipelines = tuple(
            pp for pp in _pipelines(plan, registry) if _possible(plan, other, pp, registry, refused)
        )
        if pipelines:
            found.append((distance, number, Family(other, pipelines)))
    return [family for *_, family in sorted(found, key=lambda each: each[:2])]


def _changes(plan: Plan, registry: Registry) -> Iterator[tuple[Callable[[Recipe], Recipe], float]]:
    """Yield every choice but pipeline, recomputation and schedule, with how far it is from the recipe's."""
    recipe = plan.recipe
    own = {dim: _degree(recipe, dim) for dim in ("tp", "ep", "cp")}
    choices = product(
        _degrees(plan, registry, "tp", plan.hardware.domain),
        _degrees(plan, registry, "ep", getattr(recipe.model.config, "experts", 1) or 1),
        _degrees(plan, registry, "cp", plan.hardware.domain),
        _microbatches(recipe),
        _zero_stages(recipe, registry),
        _shards(plan, registry),
    )
    for tp, ep, cp, size, stage, shard in choices:
        if shard is not None and stage is not None:  # ZeRO in place of the wrapper that shards weights
            continue
        degrees = {"tp": tp, "ep": ep, "cp": cp}
        away = sum(abs(log2(n / own[dim])) for dim, n in degrees.items())
        away += abs(log2(size / recipe.batch.microbatch))
        away += float(stage is not None and stage != _zero_stage(recipe))
        away += abs(log2((shard or plan.stages.data_ranks) / (_shard(recipe) or plan.stages.data_ranks)))
        yield _Change(registry, degrees, size, stage, shard), away


def _microbatches(recipe: Recipe) -> list[int]:
    """Return the microbatches to compare; those that phases set are not changed."""
    own = recipe.batch.microbatch
    if any("batch.microbatch" in phase.changes for phase in recipe.phase):
        return [own]
    return sorted({*MICROBATCHES, own})


@attrs.define(frozen=True)
class _Change:
    registry: Registry
    degrees: dict[str, int]
    microbatch: int
    stage: int | None
    shard: int | None

    def __call__(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these choices."""
        for dim, degree in self.degrees.items():
            if degree != _degree(recipe, dim):
                recipe = with_degree(recipe, self.registry, dim, degree)
        if self.microbatch != recipe.batch.microbatch:
            recipe = with_microbatch(recipe, self.microbatch)
        if self.stage is not None and self.stage != _zero_stage(recipe):
            recipe = with_zero(recipe, self.registry, self.stage)
        if self.shard != _shard(recipe):
            recipe = with_config(recipe, "topology", dp_shard=self.shard)
        return recipe


def _degree(recipe: Recipe, dim: str) -> int:
    return int(getattr(recipe.topology.config, dim, 1) or 1)


def _shard(recipe: Recipe) -> int | None:
    """Return how many data-parallel ranks have a copy of the weights in shards; None: all, or each one."""
    return getattr(recipe.topology.config, "dp_shard", None)


def _shards(plan: Plan, registry: Registry) -> Sequence[int | None]:
    """Return sizes to compare of the groups whose ranks have a copy of the weights in shards; None: all.

    The recipe's own comes first.
    """
    own = _shard(plan.recipe)
    if not _shards_weights(plan.recipe, registry) or not hasattr(plan.recipe.topology.config, "dp_shard"):
        return [own]
    found = {2**n for n in range(1, 20) if 2**n < plan.ranks} | ({own} if own else set())
    return sorted({None, *found}, key=lambda size: (size != own, size or 0))


def _shards_weights(recipe: Recipe, registry: Registry) -> bool:
    """Return whether data-parallel ranks have weights in shards, by a wrapper of the recipe."""
    return any("dp_shard" in registry.get("parallel", each.use).mesh_dims for each in recipe.parallel)


def _zero_stage(recipe: Recipe) -> int | None:
    """Return the stage of ZeRO that the recipe has, by its optimizer or by a wrapper of any; else None."""
    owner = recipe.optimizer if recipe.optimizer.use == "zero12" else find(recipe, "zero12")
    return owner.config.stage if owner else None


def _zero_stages(recipe: Recipe, registry: Registry) -> Sequence[int | None]:
    """Return ZeRO stages to compare; None is the recipe's own optimizer."""
    if "zero12" not in registry.names("optimizer") or recipe.optimizer.use not in ("adamw", "zero12"):
        return (None,)
    if recipe.optimizer.use == "zero12":
        return (1, 2)
    return (None, *(stage for stage in (1, 2) if stage != _zero_stage(recipe)))


def _degrees(plan: Plan, registry: Registry, dim: str, most: int) -> list[int]:
    """Return powers of two up to ``most``, and the recipe's own degree, if there is a component for them.

    Ranks share sequences only if the recipe has a wrapper for that: few recipes have sequences so long.
    """
    own = _degree(plan.recipe, dim)
    shares = dim in plan.layout.sequence_dims
    uses = [each.use for each in plan.recipe.parallel] if shares else registry.names("parallel")
    handled = any(dim in registry.get("parallel", use).mesh_dims for use in uses)
    if not handled or not hasattr(plan.recipe.topology.config, dim):
        return [own]
    found = {own} | {2**n for n in range(20) if 2**n <= min(most, plan.ranks)}
    return sorted(found)


def _pipelines(plan: Plan, registry: Registry) -> list[int]:
    own = _degree(plan.recipe, "pp")
    if not _schedules(registry) or not hasattr(plan.recipe.topology.config, "pp"):
        return [own]
    most = min(len(plan.stages.costs.layers), plan.ranks)
    found = {own} | {2**n for n in range(12) if 2**n <= most}
    return sorted(found, key=lambda pp: (abs(log2(pp / own)), pp))


def _schedules(registry: Registry) -> list[str]:
    return [use for use in SCHEDULES if use in registry.names("schedule")]


def _possible(plan: Plan, recipe: Recipe, pp: int, registry: Registry, refused: Counter[str]) -> bool:
    """Return whether degrees divide the ranks, every rank has a sequence, and weights alone fit."""
    tp, cp, ep = (_degree(recipe, dim) for dim in ("tp", "cp", "ep"))
    etp = _degree(recipe, "etp")
    dp, shard = plan.ranks // (pp * tp * cp), _shard(recipe)
    if plan.ranks % (pp * tp * cp) or plan.ranks % (pp * ep * etp) or (shard and dp % shard):
        refused["degrees that do not divide the ranks"] += 1
        return False
    own = _shard(plan.recipe)
    if _shards_weights(recipe, registry) and shard in (None, dp) and shard != (own if own == dp else None):
        return False  # all ranks, with or without saying so: the recipe's own is there
    if recipe.batch.sequences < dp * recipe.batch.microbatch:
        refused["fewer sequences than one microbatch on each data-parallel rank"] += 1
        return False
    experts = plan.parameters.by_kind["experts"]
    others, split = plan.parameters.total - experts, ep * etp
    if _shards_weights(recipe, registry):
        tp *= shard or dp
        split = tp * cp
    held = experts / split + others / tp
    kept = 0 if _zero_stage(recipe) == 2 else GRADIENT
    if held / pp * (_weight_bytes(plan) + kept) > plan.hardware.usable:
        refused["weights and gradients alone that do not fit"] += 1
        return False
    return True


def _weight_bytes(plan: Plan) -> float:
    """Return bytes of a weight, on the average."""
    steps = plan.stages.steps.values()
    elements = sum(sum(step.parameters.values()) for step in steps)
    return sum(step.state["weights"] for step in steps) / max(1, elements)


def of_family(family: Family, registry: Registry) -> Iterator[list[Recipe]]:
    """Yield runs of layouts that differ in schedule alone, or in recomputation.

    Of one pipeline and one granularity the schedules, the plainest first; granularities from that which
    computes least.
    """
    left = family.most
    for run in _runs(family, registry):
        if left == 0:
            return
        yield run[:left]
        left = None if left is None else max(0, left - len(run))


def _runs(family: Family, registry: Registry) -> Iterator[list[Recipe]]:
    for pp in family.pipelines:
        piped = family.recipe
        if pp != _degree(piped, "pp"):
            piped = with_degree(piped, registry, "pp", pp)
        for granularity in GRANULARITIES:
            if granularity is not None and "recompute" not in registry.names("parallel"):
                continue
            recipe = _recomputed(piped, registry, granularity)
            if pp == 1:
                yield [with_component(recipe, registry, "schedule", "accumulate")]
                continue
            own = recipe.schedule.use
            others = [use for use in _schedules(registry) if use != own]
            plain = "1f1b" in _schedules(registry)
            uses = sorted({own, *others}, key=lambda use: (use != "1f1b" if plain else use != own, use))
            yield [
                recipe if use == own else with_component(recipe, registry, "schedule", use) for use in uses
            ]


def _recomputed(recipe: Recipe, registry: Registry, granularity: str | None) -> Recipe:
    now = find(recipe, "recompute")
    if (now.config.granularity if now else None) == granularity:
        return recipe
    return with_recompute(recipe, registry, granularity)
