"""Estimates the layouts of one family of a sweep, and leaves out those that cannot be among the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from nanotrain_core.api import Layout, NanotrainError, Recipe, check_combination, find_problems
from nanotrain_plan.advice import find, try_plan
from nanotrain_plan.assumptions import STAY_EAGER
from nanotrain_plan.blocks.composer import Bound, Composer, Estimate, busy_seconds
from nanotrain_plan.blocks.probe import NotComposable
from nanotrain_plan.grid import Family, of_family
from nanotrain_plan.phase_stages import reached
from nanotrain_plan.plan import NO_PLAN, Plan, make_plan

#: By how much 1F1B, which holds least activations, may exceed the memory for other schedules to be examined.
MARGIN = 1.1

#: How far estimates, and bounds that are made like them, may be wrong.
TOLERANCE = 1.02

#: How much of the activations of one layout another with as many tokens in a microbatch has at least.
LEAST = 0.9

#: Schedules that hold a microbatch for each layer, if there are as many microbatches as pipeline ranks.
PLAIN = ("1f1b", "accumulate")

FULL = "activations alone that do not fit, by those of a layout before"
MISSED = "other schedules of what does not fit with 1F1B"
LEAST_MISSED = "other schedules that do not fit, whatever their weight gradients keep"
LESS_DOES = "recomputes more than it needs to fit"
SLOWER = "slower than the recipe or five found before, even if the busiest device never waited"

#: Why layouts are left out that could run. Others are refused, or cannot be planned.
BOUNDS = (FULL, MISSED, LEAST_MISSED, LESS_DOES, SLOWER)


@attrs.define(frozen=True, kw_only=True)
class Candidate:
    """One layout."""

    layout: str
    """Its degrees and options in words, as short as it tells it from others."""
    fits: bool
    """Whether its devices and its hosts have the memory."""
    peak: int
    """Bytes of the rank with the highest peak."""
    bubble: float
    tokens_per_second: float
    """The mean over the run, as :attr:`mfu`: which phase has the largest microbatches may differ."""
    mfu: float
    planned_in_full: bool = False
    """Whether it was; the others are put together from blocks."""
    stays_eager: bool = False
    """Whether its layers do, of those planned in full: they are timed as if compiled, which takes less."""


@attrs.define(frozen=True)
class Split:
    """How a layout splits activations."""

    pp: int
    tp: int
    cp: int
    tokens: float
    """In a microbatch, of a rank."""

    def bounds(self, other: Split) -> bool:
        """Return whether a layout that is split like ``other`` has at least about as many activations.

        Of as many tokens a rank has no fewer where tp or cp is larger, and may have half as many where it is
        smaller: gathered inputs, and what tp does not split, are of the tokens of all ranks along tp.
        """
        degrees = self.pp == other.pp and self.tp <= other.tp and self.cp <= other.cp
        return degrees and self.tokens <= other.tokens


@attrs.define(frozen=True)
class Held:
    """Activations of a layout of which each layer had a microbatch in flight."""

    granularity: str | None
    split: Split
    bytes: int


@attrs.define(frozen=True)
class Deferred:
    """The additional memory that a schedule takes because its weight gradients have a separate pass."""

    schedule: str
    split: Split
    bytes: tuple[int, ...]
    """Of each pipeline rank."""


@attrs.define(frozen=True)
class Known:
    """Results of earlier families, by which layouts of later ones are left out."""

    rates: tuple[float, ...] = ()
    """The highest tokens/s of layouts that fit, as many as are planned in full."""
    held: tuple[Held, ...] = ()
    deferred: tuple[Deferred, ...] = ()

    def plus(self, found: Iterable[Found], most: int) -> Known:
        """Return it with what was found of families; ``most``: rates to keep."""
        found = list(found)
        rates = [c.tokens_per_second for each in found for _, c in each.layouts if c.fits]
        held = [held for each in found for held in each.held]
        deferred = [deferred for each in found for deferred in each.deferred]
        fastest = sorted((*self.rates, *rates), reverse=True)[:most]
        return Known(tuple(fastest), (*self.held, *held), (*self.deferred, *deferred))


@attrs.define
class Found:
    """The results of one family."""

    layouts: list[tuple[Recipe, Candidate]]
    left_out: Counter[str]
    examined: int
    held: list[Held] = attrs.field(factory=list)
    deferred: list[Deferred] = attrs.field(factory=list)


class Comparison:
    """Estimates the layouts of one family, the plainest schedule and least recomputation first."""

    def __init__(self, plan: Plan, registry: Any, known: Known, most: int) -> None:
        """Prepare to compare the layouts of a family.

        Args:
            plan: of the recipe as it is.
            registry: the plugins.
            known: of families before.
            most: layouts that are planned in full in the end: what is slower than so many is of no use.
        """
        self.plan, self.registry, self.known, self.most = plan, registry, known, most
        self.composer = Composer(registry, plan.hardware)
        self.found = Found([], Counter(), 0)
        self._checked: dict[tuple[int, str], Layout | None] = {}

    def of(self, family: Family) -> Found:
        """Return what is found."""
        fitting: dict[tuple[int, str], float] = {}
        slow: set[int] = set()
        for recipes in of_family(family, self.registry):
            self.found.examined += len(recipes)
            plainest, *others = recipes
            pp = _key(plainest)[0]
            if pp in slow:  # to recompute more takes longer
                self.found.left_out[SLOWER] += len(recipes)
                continue
            if _key(plainest) not in fitting:
                reason = self._plainest(plainest, fitting)
                if reason == SLOWER:
                    slow.add(pp)
                if reason:
                    self.found.left_out[reason] += len(others)
                    continue
            else:
                self.found.left_out[LESS_DOES] += 1
            least = max((rate for (ranks, _), rate in fitting.items() if ranks == pp), default=0.0)
            for recipe in others:
                if _key(recipe) in fitting:
                    self.found.left_out[LESS_DOES] += 1
                else:
                    self._other(recipe, fitting, least if _key(plainest) in fitting else 0.0)
        return self.found

    def _plainest(self, recipe: Recipe, fitting: dict[tuple[int, str], float]) -> str | None:
        """Estimate a layout in the plainest schedule; return why others need not be examined."""
        layout = self._layout(recipe)
        if layout is None:
            return None
        if self._is_full(recipe, layout):
            self.found.left_out[FULL] += 1
            return FULL
        found = self._estimate(recipe, layout)
        if found is None:
            return None
        candidate, estimate = found
        if candidate.fits:
            fitting[_key(recipe)] = candidate.tokens_per_second
        if candidate.peak > MARGIN * self.plan.hardware.usable:
            return MISSED
        return SLOWER if self._is_slow(estimate.busy, 0.0) else None

    def _other(self, recipe: Recipe, fitting: dict[tuple[int, str], float], least: float) -> None:
        """Estimate a layout in another schedule, if it can be of use: faster than ``least`` tokens/s."""
        layout = self._layout(recipe)
        if layout is None:
            return
        try:
            bound = self.composer.bound(recipe, layout)
        except (NotComposable, NanotrainError, NotImplementedError, RuntimeError):
            bound = None  # of which the estimate will tell
        if bound is not None and self._least(recipe, layout, bound) > TOLERANCE * self.plan.hardware.usable:
            self.found.left_out[LEAST_MISSED] += 1
            return
        if bound is not None and self._is_slow(bound.seconds, least):
            self.found.left_out[SLOWER] += 1
            return
        found = self._estimate(recipe, layout)
        if found is None:
            return
        if found[0].fits:
            fitting[_key(recipe)] = found[0].tokens_per_second
        own = _held(recipe, layout, 0)
        if bound is not None and own is not None:
            more = (m.peak - low for m, low in zip(found[1].memory, bound.peaks, strict=True))
            self.found.deferred.append(Deferred(recipe.schedule.use, own.split, tuple(more)))

    def _least(self, recipe: Recipe, layout: Layout, bound: Bound) -> float:
        """Return the bytes that a layout takes at least.

        Its weight gradients need the same tensors until they are computed, whatever of them is recomputed.
        """
        own, most = _held(recipe, layout, 0), float(max(bound.peaks))
        if own is None:
            return most
        for each in (*self.known.deferred, *self.found.deferred):
            if each.schedule == recipe.schedule.use and each.split.bounds(own.split):
                peaks = (a + LEAST * b for a, b in zip(bound.peaks, each.bytes, strict=True))
                most = max(most, *peaks)
        return most

    def _is_slow(self, seconds: float, least: float) -> bool:
        """Return whether a run of no less than so many seconds cannot be among the fastest."""
        rates = self.known.plus([self.found], self.most).rates
        if self.plan.fits_everywhere:
            least = max(least, self.plan.run_tokens_per_second)
        if len(rates) == self.most:
            least = max(least, rates[-1])
        return TOLERANCE * self.plan.data.tokens < least * seconds

    def _is_full(self, recipe: Recipe, layout: Layout) -> bool:
        """Return whether a layout before, whose activations are no more than its own, had too many."""
        own = _held(recipe, layout, 0)
        return (
            own is not None
            and recipe.schedule.use in PLAIN
            and any(
                LEAST * held.bytes > self.plan.hardware.usable
                for held in self.known.held
                if held.granularity == own.granularity and held.split.bounds(own.split)
            )
        )

    def _estimate(self, recipe: Recipe, layout: Layout) -> tuple[Candidate, Estimate] | None:
        """Return a layout's candidate, or None if it cannot be planned."""
        plan = self.plan
        try:
            estimate = self._estimated(recipe, layout)
        except (NanotrainError, NotImplementedError, RuntimeError, ValueError) as problem:
            why = (str(problem) or type(problem).__name__).splitlines()[0].removeprefix(NO_PLAN)
            self.found.left_out[f"cannot be planned: {why}"] += 1
            return None
        rate = plan.data.tokens / estimate.seconds
        found = Candidate(
            layout=describe(recipe, layout),
            fits=estimate.peak <= plan.hardware.usable and estimate.host.fits,
            peak=estimate.peak,
            bubble=estimate.time.bubble,
            tokens_per_second=rate,
            mfu=_mfu(plan, rate),
        )
        self.found.layouts.append((recipe, found))
        held = _held(recipe, layout, max(rank.held["activations"] for rank in estimate.memory))
        if held is not None and recipe.schedule.use in PLAIN:
            self.found.held.append(held)
        return found, estimate

    def _estimated(self, recipe: Recipe, layout: Layout) -> Estimate:
        """Return the estimate of a layout, planned whole if it cannot be put together from blocks."""
        try:
            return self.composer.estimate(recipe, layout)
        except NotComposable:
            whole = check_combination(recipe, self.registry)
            return _estimate_of(make_plan(recipe, self.registry, whole, self.plan.hardware))

    def _layout(self, recipe: Recipe) -> Layout | None:
        """Return the layout of a recipe that can run, which recomputation decides nothing about."""
        key = _key(recipe)
        if key not in self._checked:
            layout, problems = find_problems(recipe, self.registry)
            self._checked[key] = None if problems else layout
            if problems:
                self.found.left_out[f"refused: {problems[0].key}"] += 1
        elif self._checked[key] is None:
            self.found.left_out["refused with other recomputation"] += 1
        return self._checked[key]


def _key(recipe: Recipe) -> tuple[int, str]:
    return getattr(recipe.topology.config, "pp", 1), recipe.schedule.use


def _held(recipe: Recipe, layout: Layout, size: int) -> Held | None:
    """Return so many bytes as those of a layout, None if it has fewer microbatches than pipeline ranks."""
    pp = layout.degree("pp")
    if recipe.batch.microbatches(layout.size(*layout.row_dims)) < pp:
        return None
    recomputed = find(recipe, "recompute")
    tokens = recipe.batch.microbatch * recipe.batch.length / layout.degree("tp", "cp")
    split = Split(pp, layout.degree("tp"), layout.degree("cp"), tokens)
    return Held(recomputed.config.granularity if recomputed else None, split, size)


def describe(recipe: Recipe, layout: Layout) -> str:
    """Return a layout in a line, as short as it tells it from others."""
    left = layout.data_dims  # of these what no degree says follows from the others
    degrees = {
        dim: n
        for view in layout.degrees.values()
        for dim, n in view.items()
        if dim not in left or dim in layout.views["dense"].dims or hasattr(recipe.topology.config, dim)
    }
    words = [f"{dim} {n}" for dim, n in degrees.items()]
    recomputed = find(recipe, "recompute")
    ranks = layout.size(*layout.row_dims)
    batches = [now.batch for _, now in reached(recipe)] or [recipe.batch]
    sizes = dict.fromkeys(min(batch.microbatch, -(-batch.sequences // ranks)) for batch in batches)
    words.append(f"microbatch {' and '.join(map(str, sizes))}")
    words.append(f"recompute {recomputed.config.granularity}" if recomputed else "no recompute")
    stage = getattr(recipe.optimizer.config, "stage", None)
    words.append(f"{recipe.optimizer.use}{f' {stage}' if stage else ''}")
    if degrees.get("pp", 1) > 1:
        words.append(recipe.schedule.use)
    return ", ".join(words)


def as_planned(planned: Plan, *, own: bool = False) -> Candidate:
    """Return a layout that was planned in full; ``own``: whether it is the recipe's."""
    return Candidate(
        layout=describe(planned.recipe, planned.layout) + (" (as it is)" if own else ""),
        fits=planned.fits_everywhere,
        peak=planned.worst.peak,
        bubble=planned.time.bubble,
        tokens_per_second=planned.run_tokens_per_second,
        mfu=_mfu(planned, planned.run_tokens_per_second),
        planned_in_full=True,
        stays_eager=any(each.startswith(STAY_EAGER) for each in planned.assumptions),
    )


def _estimate_of(planned: Plan) -> Estimate:
    """Return what a full plan says, in place of an estimate from blocks."""
    busy = 0.0 if planned.phases else busy_seconds(planned.time) * planned.recipe.run.steps
    return Estimate(
        memory=list(planned.memory),
        time=planned.time,
        peak=planned.worst.peak,
        host=planned.host,
        seconds=planned.seconds,
        busy=busy,
    )


def _mfu(plan: Plan, rate: float) -> float:
    """Return the MFU of a run of the plan's recipe at a rate of so many tokens/s."""
    return rate * plan.run_flops / plan.ranks / 1e12 / plan.peak_tflops


def plan_whole(recipe: Recipe, plan: Plan, registry: Any) -> Candidate | None:
    """Return a layout planned in full on the same hardware, None if it cannot be."""
    planned = try_plan(recipe, registry, plan.hardware)
    return None if planned is None else as_planned(planned)
