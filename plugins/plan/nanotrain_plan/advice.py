"""What would make a recipe fit: changes of a few keys, each planned again, so that its effect is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import attrs

from nanotrain_core.api import NanotrainError, Recipe, Registry, Selection, check_combination
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.plan import Plan, make_plan

#: Changes that are planned together, at most, before giving up.
MOST = 5


@attrs.define(frozen=True)
class Change:
    """One change of a recipe."""

    told: str
    """The keys, as they would be written."""
    apply: Callable[[Recipe], Recipe]


@attrs.define(frozen=True, kw_only=True)
class Advice:
    """Changes, and what they lead to."""

    told: str
    peak: int
    tokens_per_second: float
    """The mean over the run, as a sweep's: which phase is planned may differ."""
    fits: bool
    """On the devices, and in their hosts' memory."""


def advise(plan: Plan, registry: Registry, tell: Callable[[int], None] = lambda number: None) -> list[Advice]:
    """Return single changes that help, the best first; if none is enough, also several together.

    Args:
        plan: of the recipe as it is.
        registry: the plugins.
        tell: called with how many changes were planned so far, each of which takes as long as a plan.
    """
    tried = count()
    tell(next(tried))

    def planned_with(change: Change, recipe: Recipe) -> Plan | None:
        planned = try_plan(change.apply(recipe), registry, plan.hardware)
        tell(next(tried))
        return planned

    found: list[tuple[Change, Plan]] = []
    for change in changes(plan.recipe, registry):
        planned = planned_with(change, plan.recipe)
        if planned is not None and planned.worst.peak < plan.worst.peak:
            found.append((change, planned))
    found.sort(
        key=lambda pair: (
            not pair[1].fits_everywhere,
            -pair[1].run_tokens_per_second if pair[1].fits_everywhere else pair[1].worst.peak,
        )
    )
    told = [_advice(change.told, planned) for change, planned in found]
    if any(planned.fits_everywhere for _, planned in found):
        return told
    return told + _together(plan, [change for change, _ in found[: MOST + 3]], planned_with)


def _together(
    plan: Plan, found: Sequence[Change], planned_with: Callable[[Change, Recipe], Plan | None]
) -> list[Advice]:
    recipe, words, best = plan.recipe, [], plan
    for change in found:
        planned = planned_with(change, recipe)
        if planned is None or planned.worst.peak >= best.worst.peak:
            continue
        recipe, best = planned.recipe, planned
        words.append(change.told)
        if best.fits_everywhere or len(words) == MOST:
            break
    return [_advice(" and ".join(words), best)] if len(words) > 1 else []


def _advice(told: str, planned: Plan) -> Advice:
    return Advice(
        told=told,
        peak=planned.worst.peak,
        tokens_per_second=planned.run_tokens_per_second,
        fits=planned.fits_everywhere,
    )


def try_plan(recipe: Recipe, registry: Registry, hardware: Hardware) -> Plan | None:
    """Return the plan of a recipe, or None if its parts do not fit together."""
    try:
        return make_plan(recipe, registry, check_combination(recipe, registry), hardware)
    except (NanotrainError, ValueError):
        return None


# --- what can be changed --------------------------------------------------------------------------


def changes(recipe: Recipe, registry: Registry) -> Iterator[Change]:
    """Yield changes that save memory and leave the training what it is."""
    batch, topology = recipe.batch, recipe.topology.config
    if batch.microbatch > 1:
        for size in sorted({1, batch.microbatch // 2}):
            yield Change(f"batch.microbatch = {size}", partial(with_microbatch, size=size))
    yield from _recomputations(recipe, registry)
    if recipe.optimizer.use == "adamw" and "zero12" in registry.names("optimizer"):
        for stage in (1, 2):
            told = f'optimizer.use = "zero12", stage = {stage}' + (
                ", without [[parallel]] ddp" if find(recipe, "ddp") else ""
            )
            yield Change(told, partial(with_zero, registry=registry, stage=stage))
    if recipe.optimizer.use == "zero12" and recipe.optimizer.config.stage == 1:
        yield Change("optimizer.stage = 2", partial(with_config, kind="optimizer", stage=2))
    if getattr(recipe.optimizer.config, "moment_dtype", "") == "float32":
        yield Change(
            'optimizer.moment_dtype = "bfloat16"',
            partial(with_config, kind="optimizer", moment_dtype="bfloat16"),
        )
    if recipe.precision.use == "fp32":
        other = partial(with_component, registry=registry, kind="precision", use="bf16")
        yield Change('precision.use = "bf16"', other)
    for dim in ("tp", "pp", "ep"):
        degree = getattr(topology, dim, None)
        if degree:
            told = f"topology.{dim} = {2 * degree}{_with_its_component(recipe, registry, dim)}"
            yield Change(told, partial(with_degree, registry=registry, dim=dim, degree=2 * degree))


def _recomputations(recipe: Recipe, registry: Registry) -> Iterator[Change]:
    """Yield more activation checkpointing: of a recipe that has some, as the key to change."""
    recomputed = find(recipe, "recompute")
    if recomputed is None:
        for granularity in ("selective", "full"):
            told = f'[[parallel]] use = "recompute", granularity = "{granularity}"'
            yield Change(told, partial(with_recompute, registry=registry, granularity=granularity))
    elif recomputed.config.granularity == "selective":
        told = f'parallel.{recipe.parallel.index(recomputed)}.granularity = "full"'
        yield Change(told, with_full_recompute)


def find(recipe: Recipe, use: str) -> Selection | None:
    """Return the parallel wrapper of that name."""
    return next((each for each in recipe.parallel if each.use == use), None)


def with_microbatch(recipe: Recipe, size: int) -> Recipe:
    """Return the recipe with microbatches of so many sequences."""
    return attrs.evolve(recipe, batch=attrs.evolve(recipe.batch, microbatch=size))


def with_config(recipe: Recipe, kind: str, **keys: Any) -> Recipe:
    """Return the recipe with other keys of a component."""
    selection: Selection = getattr(recipe, kind)
    return _with(recipe, attrs.evolve(selection, config=attrs.evolve(selection.config, **keys)))


def _with(recipe: Recipe, selection: Selection) -> Recipe:
    changed: dict[str, Any] = {selection.kind: selection}
    return attrs.evolve(recipe, **changed)


def with_component(recipe: Recipe, registry: Registry, kind: str, use: str, **keys: Any) -> Recipe:
    """Return the recipe with another component, its keys at their defaults."""
    return _with(recipe, Selection(kind, use, registry.get(kind, use).config(**keys)))


def with_recompute(recipe: Recipe, registry: Registry, granularity: str | None) -> Recipe:
    """Return the recipe with activation checkpointing of all layers, or with none."""
    others = tuple(each for each in recipe.parallel if each.use != "recompute")
    if granularity is not None:
        config = registry.get("parallel", "recompute").config(granularity=granularity)
        others = (*others, Selection("parallel", "recompute", config))
    return attrs.evolve(recipe, parallel=others)


def with_full_recompute(recipe: Recipe) -> Recipe:
    """Return the recipe with full activation checkpointing in place of selective, all else as it is."""
    changed = (
        attrs.evolve(each, config=attrs.evolve(each.config, granularity="full"))
        if each.use == "recompute"
        else each
        for each in recipe.parallel
    )
    return attrs.evolve(recipe, parallel=tuple(changed))


def with_zero(recipe: Recipe, registry: Registry, stage: int) -> Recipe:
    """Return the recipe with ZeRO in place of AdamW, and of whoever syncs gradients."""
    old = recipe.optimizer.config
    kind = registry.get("optimizer", "zero12").config
    known = {field.name for field in attrs.fields(kind)}
    keys = {name: value for name, value in attrs.asdict(old, recurse=False).items() if name in known}
    config = kind(**{**keys, "stage": stage})
    kept = tuple(
        each for each in recipe.parallel if "gradient_sync" not in registry.get("parallel", each.use).provides
    )
    return attrs.evolve(recipe, parallel=kept, optimizer=Selection("optimizer", "zero12", config))


#: The component that a degree above 1 needs, if the recipe has none. Other degrees are changed where it has.
HANDLERS = {"tp": ("parallel", "tp"), "ep": ("parallel", "ep_deepseek"), "pp": ("schedule", "1f1b")}


def _lacks(recipe: Recipe, registry: Registry, dim: str) -> bool:
    """Return whether the component of :data:`HANDLERS` is installed and needed for a degree above 1."""
    kind, use = HANDLERS[dim]
    if use not in registry.names(kind):
        return False
    if kind == "schedule":
        return "pp" not in registry.get("schedule", recipe.schedule.use).mesh_dims
    return find(recipe, use) is None


def _with_its_component(recipe: Recipe, registry: Registry, dim: str) -> str:
    """Return how the component that :func:`with_degree` adds would be written; empty if it adds none."""
    kind, use = HANDLERS[dim]
    if not _lacks(recipe, registry, dim):
        return ""
    return f', schedule.use = "{use}"' if kind == "schedule" else f', first [[parallel]] use = "{use}"'


def with_degree(recipe: Recipe, registry: Registry, dim: str, degree: int) -> Recipe:
    """Return the recipe with another degree, and with the component that handles it."""
    recipe = with_config(recipe, "topology", **{dim: degree})
    if degree == 1 or dim not in HANDLERS or not _lacks(recipe, registry, dim):
        return recipe
    kind, use = HANDLERS[dim]
    if kind == "schedule":
        return with_component(recipe, registry, "schedule", use)
    wrapper = Selection(kind, use, registry.get(kind, use).config())
    return attrs.evolve(recipe, parallel=(wrapper, *recipe.parallel))
