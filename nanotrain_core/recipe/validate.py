"""Checks that the components of a recipe can work together, before any process starts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.compile.cuda_graphs import not_captured
from nanotrain_core.compile.eager import kept_eager, refused
from nanotrain_core.component import EXCLUSIVE_CAPABILITIES, LISTED_KINDS, Component
from nanotrain_core.errors import NanotrainError, PluginError, Problem, RecipeError, describe, expect_result
from nanotrain_core.layout.layout import Layout
from nanotrain_core.phases.tables import key_in_force
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe.component_functions import call_declared
from nanotrain_core.recipe.divisibility import join_with_or, multiples_near
from nanotrain_core.recipe.metric_names import unknown_metrics
from nanotrain_core.recipe.replicas import replica_dims
from nanotrain_core.recipe.schedule_checks import expect_each_pass, expect_one_step
from nanotrain_core.recipe.suggestions import for_idle_ranks
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.registry import Registry

if TYPE_CHECKING:  # contracts import torch
    from nanotrain_core.contracts import Topology

#: Maximum microbatches per rank and step: the schedule's actions for each are checked one by one.
MOST_MICROBATCHES = 16_384
#: Largest world size to try, in search of one that fits the degrees of a recipe.
MOST = 4096


@attrs.define(frozen=True)
class Member:
    """One selected component and its location in the recipe."""

    key: str
    selection: Selection
    component: Component

    @property
    def word(self) -> str:
        """Its name in ``Component.conflicts``."""
        return f"{self.selection.kind}:{self.selection.use}"

    def __str__(self) -> str:
        return f"{self.selection.kind} '{self.selection.use}'"


def check_combination(recipe: Recipe, registry: Registry) -> Layout:
    """Return the layout of a recipe whose components fit together.

    Raises:
        RecipeError: they do not; one line ``key: what`` for each reason.
    """
    layout, problems = find_problems(recipe, registry)
    if problems or layout is None:
        raise RecipeError([f"{problem.key}: {problem.message}" for problem in problems])
    return layout


def find_problems(recipe: Recipe, registry: Registry) -> tuple[Layout | None, list[Problem]]:
    """Return the layout, None if the degrees do not fit, and every problem of the combination."""
    members = _members(recipe, registry)
    problems = [*_twice(members), *_capabilities(members, registry)]
    absent = list(_modules(members))
    if absent:
        return None, [*absent, *problems]
    topology = registry.build(recipe.topology)
    try:
        layout = expect_result(
            f"topology '{recipe.topology.use}'", "layout", topology.layout(recipe.run.ranks), Layout
        )
    except ValueError as error:
        text = f"{recipe.run.ranks} ranks do not fit [topology]: {error}"
        problems += [Problem("run.ranks", text), *_lr_schedule(recipe)]
        near = _nearest(topology, recipe.run.ranks)
        if near is not None:  # also report problems that do not depend on the number of ranks
            mismatches = list(_dimensions(members, near, recipe, registry))
            unready = mismatches or any(_batch(recipe, near))  # problems of this number of ranks only
            problems += mismatches if unready else _stages(recipe, near, registry)
            problems += _own_checks(members, recipe, near, registry)
        return None, problems
    except NanotrainError:
        raise
    except Exception as error:
        raise PluginError(f"topology '{recipe.topology.use}': layout() raised {describe(error)}") from error
    problems += _lr_schedule(recipe)
    mismatches = [*_batch(recipe, layout), *_dimensions(members, layout, recipe, registry)]
    problems += mismatches or _stages(recipe, layout, registry)
    problems += _own_checks(members, recipe, layout, registry)
    problems += unknown_metrics(recipe, registry)
    if recipe.phase and not problems:
        problems += _phases(recipe, layout, registry)
    if not problems:
        device = None if recipe.run.device == "auto" else recipe.run.device
        problems += not_captured(recipe, registry, layout, device)
        if recipe.run.compile is True:
            problems += refused(recipe, kept_eager(recipe, registry, layout, device))
    return layout, problems


def _phases(recipe: Recipe, layout: Layout, registry: Registry) -> Iterator[Problem]:
    """Check the recipe at the beginning of each phase and the end of ramps, and the batch sizes between."""
    decays = recipe.optimizer.config.lr_schedule.use
    changing = [number for number, phase in enumerate(recipe.phase) if "optimizer.lr" in phase.changes]
    if changing and decays != "constant":
        text = (
            f"a phase and lr_schedule '{decays}' both change the rate: set "
            "optimizer.lr_schedule.use = 'constant' (its warmup_steps may stay)"
        )
        yield Problem(f"phase.{changing[0]}.optimizer.lr", text)
    timeline, reported = PhaseTimeline(recipe), set[str]()
    yield from _lengths(recipe, timeline, registry)
    found, counts = list[tuple[int, Problem]](), {microbatches_of(recipe, layout)}
    for number, now in timeline.corners():
        wrong, count = list(_batch(now, layout)), microbatches_of(now, layout)
        if not wrong and count not in counts:
            wrong += _stages(now, layout, registry)
            counts.add(count)
        wrong += _own_checks(_members(now, registry), now, layout, registry)
        found += ((number, problem) for problem in wrong)
    dp = layout.size(*layout.row_dims)
    for number, sizes in timeline.ramps():
        for size in sizes[:dp]:  # afterwards the remainders modulo dp repeat
            found += ((number, problem) for problem in _batch(timeline.with_batch(number, size), layout))
    if not found:
        found += _ramps(timeline, layout, registry)
    for number, problem in found:
        key = key_in_force(recipe, number, problem.key)
        if key not in reported:
            yield Problem(key, problem.message)
        reported.add(key)


def _lengths(recipe: Recipe, timeline: PhaseTimeline, registry: Registry) -> Iterator[Problem]:
    """Check that the data can change the length of its sequences, if phases do."""
    use, lengths = recipe.data.use, timeline.lengths()
    if len(lengths) < 2 or _changes_length(use, registry):
        return
    number = next(n for n, now in timeline.corners() if now.batch.length != recipe.batch.length)
    able = " or ".join(f"'{each}'" for each in registry.names("data") if _changes_length(each, registry))
    yield Problem(
        key_in_force(recipe, number, "batch.length"),
        f"data '{use}' of {registry.owner('data', use)} cannot change the length of its sequences in a run; "
        f"expected {recipe.batch.length}, or data {able}",
    )


def _changes_length(use: str, registry: Registry) -> bool:
    return "changes_length" in registry.get("data", use).provides


def _ramps(timeline: PhaseTimeline, layout: Layout, registry: Registry) -> Iterator[tuple[int, Problem]]:
    """Check the schedule with the smallest number of microbatches for each remainder modulo 2 * pp.

    Schedules reject numbers of microbatches only by remainder; checking all sizes would take long.
    """
    around = 2 * layout.degree("pp")
    dp = layout.size(*layout.row_dims)
    for number, sizes in timeline.ramps():
        batch, seen = timeline.with_batch(number, 1).batch, set[int]()
        period = around * dp * batch.microbatch  # period of the remainders
        for size in sizes[:period] if sizes.step > 0 else sizes[::-1][:period]:
            count = attrs.evolve(batch, sequences=size).microbatches(dp)
            if count % around in seen:
                continue
            seen.add(count % around)
            now = timeline.with_batch(number, size)
            for problem in _stages(now, layout, registry, between=True):
                text = f"{problem.message} ({count} microbatches: a batch of {size} sequences in the ramp)"
                yield number, Problem(problem.key, text)
                return
            if len(seen) == around:
                break


def _nearest(topology: Topology, ranks: int) -> Layout | None:
    """Return a layout with the same degrees and the nearest number of ranks, fewer if possible."""
    for number in (*range(ranks - 1, 0, -1), *range(ranks + 1, MOST + 1)):
        with suppress(ValueError):
            return topology.layout(number)
    return None


def _stages(
    recipe: Recipe, layout: Layout, registry: Registry, *, between: bool = False
) -> Iterator[Problem]:
    """Check the schedule's actions, and its stages where the recipe gives the number of layers.

    ``between``: whether to check only that each pass occurs once, as between two sizes checked completely.
    """
    schedule = registry.build(recipe.schedule)
    pp, microbatches = layout.degree("pp"), microbatches_of(recipe, layout)
    refusal = _refusal if isinstance(schedule, Hashable) else _refusal.__wrapped__
    try:
        wrong = refusal(schedule, None if between else recipe.model.config.layers, pp, microbatches, between)
    except Exception as error:
        raise PluginError(f"schedule '{recipe.schedule.use}' raised {describe(error)}") from error
    if wrong is not None:
        yield Problem("schedule", f"'{recipe.schedule.use}': {wrong}")
        return
    for each in (each for each in recipe.selections() if "w_passes" in each.unsupported):
        if any(action.kind == "W" for rank in schedule.actions(pp, microbatches) for action in rank):
            text = (
                f"'{recipe.schedule.use}' has W passes, which {each.kind} '{each.use}' declares that it does "
                "not support; expected a schedule without, such as 1F1B"
            )
            yield Problem("schedule", text)


@lru_cache(4096)  # a sweep requests the same actions of one schedule at many degrees
def _refusal(schedule: Any, layers: int | None, pp: int, microbatches: int, between: bool) -> str | None:
    """Return what is wrong with a schedule's stages and actions, which depend only on these arguments."""
    try:
        if between:
            expect_each_pass(schedule, pp=pp, microbatches=microbatches)
        else:
            expect_one_step(schedule, layers=layers, pp=pp, microbatches=microbatches)
    except ValueError as error:
        return str(error)
    return None


def microbatches_of(recipe: Recipe, layout: Layout) -> int:
    """Return how many microbatches one rank runs in a step."""
    dp = layout.size(*layout.row_dims)
    return recipe.batch.microbatches(dp)


def _lr_schedule(recipe: Recipe) -> Iterator[Problem]:
    """Reject a decay that would begin during warm-up: the rate would jump."""
    schedule, steps = recipe.optimizer.config.lr_schedule, recipe.run.steps
    if schedule.decay_steps and schedule.warmup_steps + schedule.decay_steps > steps:
        yield Problem(
            "optimizer.lr_schedule.decay_steps",
            f"{schedule.warmup_steps} steps of warm-up and {schedule.decay_steps} of decay do not fit into a "
            f"run of {steps} steps",
        )


def _own_checks(
    members: list[Member], recipe: Recipe, layout: Layout, registry: Registry
) -> Iterator[Problem]:
    for member in members:
        yield from call_declared("check", member.selection, recipe, layout, registry, Problem)


def _modules(members: list[Member]) -> Iterator[Problem]:
    """Check that the modules to be imported exist."""
    for member in members:
        if not member.component.has_module():
            factory = member.component.factory
            yield Problem(f"{member.key}.use", f"{member}: its factory '{factory}' is in no module there is")


def _twice(members: list[Member]) -> Iterator[Problem]:
    """Reject a wrapper that is applied twice; several monitors of one kind are allowed."""
    seen: dict[str, Member] = {}
    for member in members:
        if member.selection.kind == "parallel" and member.word in seen:
            yield Problem(member.key, f"{member} is already {seen[member.word].key}; remove one of them")
        seen.setdefault(member.word, member)


def _members(recipe: Recipe, registry: Registry) -> list[Member]:
    members: list[Member] = []
    for selection in recipe.selections():
        index = sum(member.selection.kind == selection.kind for member in members)
        key = f"{selection.kind}.{index}" if selection.kind in LISTED_KINDS else selection.kind
        members.append(Member(key, selection, registry.get(selection.kind, selection.use)))
    return members


def _capabilities(members: list[Member], registry: Registry) -> Iterator[Problem]:
    """Check what components provide, require and conflict with against each other."""
    for word, meaning in EXCLUSIVE_CAPABILITIES.items():
        providers = [member for member in members if word in member.component.provides]
        for second in (each for each in providers[1:] if each.word != providers[0].word):  # see _twice
            text = f"{providers[0]} and {second} both provide {word} ({meaning}); keep one of them"
            yield Problem(second.key, text)
    for member in members:
        others = [other for other in members if other is not member]
        provided = {word for other in others for word in other.component.provides}
        more = member.component.requires_for
        required = member.component.requires | {*(more(member.selection.config) if more else ())}
        for word in sorted(required - provided):
            offers = ", ".join(registry.providers(word)) or "none"
            yield Problem(
                member.key, f"{member} needs {word}; installed components that provide it: {offers}"
            )
        for other in others:
            for word in sorted(member.component.conflicts & {other.word, *other.component.provides}):
                reason = "" if word == other.word else f", which provides {word}"
                yield Problem(member.key, f"{member} cannot be combined with {other}{reason}")


def _batch(recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    """Check that no rank has an empty microbatch: data dimensions split rows, or the tokens of each row."""
    parts, length = layout.size(*layout.sequence_dims), recipe.batch.length
    if length < parts:
        dims = f"{' x '.join(layout.sequence_dims)} = {parts}"
        text = f"{length} tokens are fewer than {dims} ranks, which share each sequence; nearest: {parts}"
        yield Problem("batch.length", text)
    dp = layout.size(*layout.row_dims)
    rows = f"{' x '.join(layout.row_dims) or 'dp'} = {dp}"
    batch, nearest = recipe.batch, join_with_or(multiples_near(recipe.batch.sequences, dp))
    fewest, microbatches = batch.sequences // dp, batch.microbatches(dp)
    if fewest == 0:
        text = f"{batch.sequences} would leave some of {rows} ranks without a sequence; nearest: {nearest}"
        yield Problem("batch.sequences", text)
    elif microbatches > MOST_MICROBATCHES:
        text = (
            f"{batch.sequences} are {microbatches:,} microbatches of {batch.microbatch} on each of {rows} "
            f"ranks; expected at most {MOST_MICROBATCHES:,} a step: lower it, or raise batch.microbatch"
        )
        yield Problem("batch.sequences", text)
    elif fewest < microbatches:  # with one sequence each: larger microbatches always leave one for the last
        text = (
            f"{batch.sequences} would leave some of {rows} ranks without a sequence in the last of "
            f"{microbatches} microbatches, in which all take part; nearest: {nearest}, or "
            "batch.microbatch = 2"
        )
        yield Problem("batch.sequences", text)


def _dimensions(
    members: list[Member], layout: Layout, recipe: Recipe, registry: Registry
) -> Iterator[Problem]:
    """Check that some component handles each dimension that has more than one rank, and that all support it.

    Data-parallel dimensions need none to handle them: the core itself reduces partial gradients.
    """
    handled = {*replica_dims(recipe, layout)}.union(*(member.component.mesh_dims for member in members))
    split = [dim for dim in layout.dims if layout.size(dim) > 1]
    for each, dim in product(recipe.selections(), split):
        if dim in each.unsupported:
            whose = f"{each.kind} '{each.use}' declares that it does not support it"
            yield Problem(f"topology.{dim}", f"{dim} = {layout.size(dim)}, and {whose}")
    for dim in (dim for dim in split if dim not in handled):
        remedy = for_idle_ranks(dim, recipe.model, layout, registry)
        text = f"{dim} = {layout.size(dim)}, but no component of this recipe handles {dim}; {remedy}"
        yield Problem(f"topology.{dim}", text)


def remarks(recipe: Recipe, registry: Registry, layout: Layout) -> Iterator[str]:
    """Yield remarks on recipes that work, but could work better."""
    if recipe.phase:
        yield from _phase_remarks(PhaseTimeline(recipe), recipe.run.steps)
    if recipe.monitor and not any(
        {"prints_metrics", "records_metrics"} & registry.get("monitor", each.use).provides
        for each in recipe.monitor
    ):  # an empty list is intentional: nobody writes it by accident
        yield 'no monitor prints or records this run: add [[monitor]] use = "console" and "jsonl"'
    chosen = (registry.get(selection.kind, selection.use) for selection in recipe.selections())
    faster = registry.providers("gradient_sync")
    if not faster or any("gradient_sync" in component.provides for component in chosen):
        return
    replicas = replica_dims(recipe, layout)
    for dim in replicas:
        # Without experts spread over ranks nothing is placed in another view than the dense one.
        split = (d for d in layout.view([dim]).dims if d not in ("pp", *replicas))
        placed = dim in layout.row_dims or layout.degree(*split) > 1
        if placed and layout.size(dim) > 1:
            size, others = f"{dim} = {layout.size(dim)}", " or ".join(faster)
            yield (
                f"{size}: gradients are summed after backward; {others} would overlap the reduction with "
                "backward"
            )
            return


def _phase_remarks(timeline: PhaseTimeline, steps: int) -> Iterator[str]:
    """Yield a remark if a run is shorter or longer than its phases."""
    reached, ended = timeline.reached(steps), timeline.ended(steps)
    if reached < len(timeline.spans):
        yield f"run.steps = {steps} ends the run before phase.{reached} begins"
    elif ended < steps:
        yield f"phases end at step {ended:,}; steps {ended + 1:,} to {steps:,} keep the last phase's values"
