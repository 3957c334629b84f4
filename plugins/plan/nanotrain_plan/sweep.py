"""Compares layouts of a recipe by predicted tokens/s, put together from blocks that are measured once.

The grid is taken family by family, those nearest to the recipe's own degrees first, until exactly as many
layouts as asked for were examined, or all. Left out are those that the framework refuses, that cannot fit,
that recompute more than they need to, and those whose devices, never idle, would still be slower than the
recipe as it is. The fastest are then planned in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from nanotrain_core.api import Recipe, Registry, usable_processors
from nanotrain_plan.blocks.schedules import RememberedSchedules
from nanotrain_plan.compare import BOUNDS, Candidate, as_planned, describe
from nanotrain_plan.grid import families, of_family
from nanotrain_plan.plan import Plan
from nanotrain_plan.workers import Job, Workers

#: Layouts that are planned in full, in the end.
WHOLE = 5

BEYOND = "beyond the number of layouts asked for"


@attrs.define(frozen=True, kw_only=True)
class Swept:
    """What a sweep found."""

    candidates: Sequence[Candidate]
    """Those that fit first, the fastest first."""
    examined: int
    """:attr:`planned`, :attr:`bounded` and :attr:`refused` together: as many as asked for, or the whole
    grid."""
    planned: int
    """Put together from blocks, or planned in full."""
    bounded: int
    """Left out since a bound says that they do not fit, or cannot be among the fastest."""
    refused: int
    """Layouts that cannot run, or cannot be planned."""
    left_out: dict[str, int]
    """Numbers of layouts by reason."""


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
        limit: how many layouts to examine: those that are planned, left out by a bound, and refused.
        tell: called with how many were examined so far.
        processes: that measure at once; as many as there are processors, by default.
    """
    left_out: Counter[str] = Counter()
    chosen, left = [], limit
    for family in families(plan, registry, left_out):
        size = sum(map(len, of_family(family, registry)))
        if left:
            chosen.append(attrs.evolve(family, most=left))
        left, beyond = max(0, left - size), max(0, size - left)
        if beyond:
            left_out[BEYOND] += beyond
    found: list[tuple[Recipe, Candidate]] = []
    examined = 0
    job = Job(plan, RememberedSchedules(registry), WHOLE)
    with Workers(job, processes or usable_processors()) as workers:
        for each in workers.compare(chosen):
            found += each.layouts
            left_out += each.left_out
            examined += each.examined
            tell(examined)
        found.sort(key=lambda pair: (not pair[1].fits, -pair[1].tokens_per_second, pair[1].layout))
        as_it_is = describe(plan.recipe, plan.layout)
        best = workers.plan_whole([recipe for recipe, each in found[:WHOLE] if each.layout != as_it_is])
    own = as_planned(plan, own=True)
    others = [each for each in best if each is not None]
    described = {each.layout for each in others} | {as_it_is}
    rest = [candidate for _, candidate in found if candidate.layout not in described]
    candidates = [own, *others, *rest]
    candidates.sort(key=lambda each: (not each.fits, -each.tokens_per_second, each.layout))
    bounded = sum(left_out[reason] for reason in BOUNDS)
    return Swept(
        candidates=candidates,
        examined=examined,
        planned=len(found),
        bounded=bounded,
        refused=examined - len(found) - bounded,
        left_out=dict(sorted(left_out.items())),
    )
