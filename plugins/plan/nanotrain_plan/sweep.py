"""Compares layouts of a recipe by predicted tokens/s, put together from blocks that are measured once.

The grid is taken family by family, those nearest to the recipe's own degrees first, until as many layouts as
asked for were looked at. Left out are those that the framework refuses, that cannot fit, that recompute more
than they need to, and those whose devices, never idle, would still be slower than the recipe as it is. The
fastest are then planned whole.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import attrs

from nanotrain_core.api import Layout, NanotrainError, Recipe, Registry, find_problems
from nanotrain_plan.advice import find, try_plan
from nanotrain_plan.blocks.composer import Composer, Estimate
from nanotrain_plan.blocks.probe import NotComposable
from nanotrain_plan.grid import Family, families, of_family
from nanotrain_plan.plan import Plan

#: Layouts that are planned whole, in the end.
WHOLE = 5

#: By how much 1F1B, which holds least activations, may exceed the memory for other schedules to be looked at.
MARGIN = 1.1


@attrs.define(frozen=True, kw_only=True)
class Candidate:
    """One layout."""

    told: str
    """What tells it from others."""
    fits: bool
    peak: int
    bubble: float
    tokens_per_second: float
    mfu: float
    whole: bool = False
    """Whether it was planned whole; the others are put together from blocks."""


@attrs.define(frozen=True, kw_only=True)
class Swept:
    """What a sweep found."""

    candidates: Sequence[Candidate]
    """Those that fit first, the fastest first."""
    looked_at: int
    left_out: dict[str, int]
    """Numbers of layouts by reason."""


@attrs.define
class Found:
    """Of one family."""

    layouts: list[tuple[Recipe, Candidate]]
    left_out: Counter[str]
    looked_at: int


def sweep(
    plan: Plan,
    registry: Registry,
    limit: int,
    tell: Callable[[int], None] = lambda number: None,
    processes: int | None = None,
) -> Swept:
    """Return the layouts that were compared.

    Args:
        plan: of the recipe as it is.
        registry: the plugins.
        limit: how many layouts to look at.
        tell: called with how many were looked at so far.
        processes: that measure at once; as many as there are processors, by default.
    """
    left_out: Counter[str] = Counter()
    chosen, number = [], 0
    for family in families(plan, registry, left_out):
        if number < limit:
            chosen.append(family)
            number += sum(map(len, of_family(family, registry)))
        else:
            left_out["beyond the number of layouts asked for"] += sum(map(len, of_family(family, registry)))
    found: list[tuple[Recipe, Candidate]] = []
    looked_at = 0
    for each in _measure(partial(_compare, plan, registry), chosen, processes):
        found += each.layouts
        left_out += each.left_out
        looked_at += each.looked_at
        tell(looked_at)
    found.sort(key=lambda pair: (not pair[1].fits, -pair[1].tokens_per_second, pair[1].told))
    best = [_whole(recipe, plan, registry) for recipe, _ in found[:WHOLE]]
    own = _candidate(plan, plan)
    as_it_is = describe(plan.recipe, plan.layout)
    others = [each for each in best if each is not None and each.told != as_it_is]
    told = {each.told for each in others} | {as_it_is}
    rest = [candidate for _, candidate in found if candidate.told not in told]
    candidates = [own, *others, *rest]
    candidates.sort(key=lambda each: (not each.fits, -each.tokens_per_second, each.told))
    return Swept(candidates=candidates, looked_at=looked_at, left_out=dict(sorted(left_out.items())))


def _measure(
    compare: Callable[[Family], Found], chosen: Sequence[Family], processes: int | None
) -> Iterable[Found]:
    """Yield what is found of each family, in their order, measured by several processes at once."""
    count = min(processes or _processors(), len(chosen))
    if count <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(compare, chosen)
        return
    global _comparison  # noqa: PLW0603 what is forked takes it over
    _comparison = compare
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_compare_here, chosen)


_comparison: Callable[[Family], Found] | None = None
"""What processes that are forked take over: plugins cannot be sent to them."""


def _compare_here(family: Family) -> Found:
    assert _comparison is not None
    return _comparison(family)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compare(plan: Plan, registry: Registry, family: Family) -> Found:
    """Estimate the layouts of a family."""
    return _Comparison(plan, registry).of(family)


class _Comparison:
    """Estimates the layouts of one family, and leaves out those that cannot be the best."""

    def __init__(self, plan: Plan, registry: Registry) -> None:
        self.plan, self.registry = plan, registry
        self.composer = Composer(registry, plan.hardware)
        self.found = Found([], Counter(), 0)
        self._checked: dict[tuple[int, str], Layout | None] = {}

    def of(self, family: Family) -> Found:
        """Return what is found."""
        fitting: set[tuple[int, str]] = set()
        for recipes in of_family(family, self.registry):
            self.found.looked_at += len(recipes)
            plainest, *others = recipes
            if _key(plainest) not in fitting:
                first = self._estimate(plainest)
                if first is not None and first[0].fits:
                    fitting.add(_key(plainest))
                reason = self._beaten(first)
                if reason and others:
                    self.found.left_out[reason] += len(others)
                    continue
            else:
                self.found.left_out["recomputes more than it needs to fit"] += 1
            for recipe in others:
                if _key(recipe) in fitting:
                    self.found.left_out["recomputes more than it needs to fit"] += 1
                    continue
                other = self._estimate(recipe)
                if other is not None and other[0].fits:
                    fitting.add(_key(recipe))
        return self.found

    def _beaten(self, plainest: tuple[Candidate, float] | None) -> str | None:
        """Return why other schedules need not be looked at; of 1F1B also tokens/s without a bubble."""
        if plainest is None:
            return None
        candidate, ceiling = plainest
        if candidate.peak > MARGIN * self.plan.hardware.usable:
            return "other schedules of what does not fit with 1F1B"
        if self.plan.fits and ceiling < self.plan.tokens_per_second:
            return "slower than the recipe, even if no device ever waited"
        return None

    def _estimate(self, recipe: Recipe) -> tuple[Candidate, float] | None:
        """Return a layout's candidate and its tokens/s without a bubble, or None if it cannot run."""
        plan, left_out = self.plan, self.found.left_out
        layout = self._layout(recipe)
        if layout is None:
            return None
        try:
            estimate = self.composer.estimate(recipe, layout)
        except NotComposable:
            whole = try_plan(recipe, self.registry, plan.hardware)
            if whole is None:
                left_out["cannot be planned"] += 1
                return None
            estimate = Estimate(list(whole.memory), whole.time)
        except (NanotrainError, NotImplementedError, RuntimeError):
            left_out["cannot be planned"] += 1
            return None
        rate = plan.data.tokens_per_step / estimate.time.seconds
        busy = estimate.time.pipeline * (1 - estimate.time.bubble) + estimate.time.after
        found = Candidate(
            told=describe(recipe, layout),
            fits=estimate.peak <= plan.hardware.usable,
            peak=estimate.peak,
            bubble=estimate.time.bubble,
            tokens_per_second=rate,
            mfu=rate * plan.flops.model / plan.ranks / 1e12 / plan.peak_tflops,
        )
        self.found.layouts.append((recipe, found))
        return found, plan.data.tokens_per_step / busy

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


def _whole(recipe: Recipe, plan: Plan, registry: Registry) -> Candidate | None:
    planned = try_plan(recipe, registry, plan.hardware)
    return None if planned is None else _candidate(planned, plan)


def _candidate(planned: Plan, origin: Plan) -> Candidate:
    return Candidate(
        told=describe(planned.recipe, planned.layout) + (" (as it is)" if planned is origin else ""),
        fits=planned.fits,
        peak=planned.worst.peak,
        bubble=planned.time.bubble,
        tokens_per_second=planned.tokens_per_second,
        mfu=planned.tflops() / planned.peak_tflops,
        whole=True,
    )


def describe(recipe: Recipe, layout: Layout) -> str:
    """Return a layout in a line, as short as it tells it from others."""
    degrees = {dim: n for view in layout.degrees.values() for dim, n in view.items() if dim != "edp"}
    words = [f"{dim} {n}" for dim, n in degrees.items()]
    recomputed = find(recipe, "recompute")
    words.append(f"microbatch {recipe.batch.microbatch}")
    words.append(f"recompute {recomputed.config.granularity}" if recomputed else "no recompute")
    stage = getattr(recipe.optimizer.config, "stage", None)
    words.append(f"{recipe.optimizer.use}{f' {stage}' if stage else ''}")
    if degrees.get("pp", 1) > 1:
        words.append(recipe.schedule.use)
    return ", ".join(words)
