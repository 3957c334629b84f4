"""Processes that compare families of layouts in parallel, each using the results of earlier families.

Which earlier families these are depends neither on the number of processes nor on their speed: a sweep gives
the same results on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import attrs

from nanotrain_core.api import Recipe
from nanotrain_plan.compare import Candidate, Comparison, Found, Known, plan_whole
from nanotrain_plan.forks import pool_of_forks
from nanotrain_plan.grid import Family
from nanotrain_plan.plan import Plan

#: Most families that are compared at once. Each uses the results of all that are at least so many before.
AT_ONCE = 3


@attrs.define(frozen=True)
class Job:
    """What every family is compared with."""

    plan: Plan
    registry: Any
    most: int
    """Layouts that are planned in full in the end."""

    def compare(self, family: Family, known: Known) -> Found:
        """Return what is found of a family."""
        return Comparison(self.plan, self.registry, known, self.most).of(family)

    def plan_whole(self, recipe: Recipe) -> Candidate | None:
        """Return a layout planned in full."""
        return plan_whole(recipe, self.plan, self.registry)


_job: Job | None = None
"""What processes that are forked take over: plugins cannot be sent to them."""


def _compare(family: Family, known: Known) -> Found:
    assert _job is not None
    return _job.compare(family, known)


def _plan_whole(recipe: Recipe) -> Candidate | None:
    assert _job is not None
    return _job.plan_whole(recipe)


class Workers:
    """Processes that are forked from this one, or this one alone. Use it in ``with``."""

    def __init__(self, job: Job, processes: int) -> None:
        global _job  # noqa: PLW0603 what is forked takes it over
        self._job = _job = job
        self._pool = pool_of_forks(min(processes, AT_ONCE))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compare(self, families: Sequence[Family]) -> Iterator[Found]:
        """Yield what is found of each family, in their order."""
        known = Known()  # what is found until those that are under way
        under_way: list[Future[Found] | Found] = []
        most = self._job.most
        for family in families:
            if len(under_way) == AT_ONCE:
                found = _result(under_way.pop(0))
                known = known.plus([found], most)
                yield found
            pool = self._pool
            under_way.append(
                pool.submit(_compare, family, known) if pool else self._job.compare(family, known)
            )
        yield from map(_result, under_way)

    def plan_whole(self, recipes: Sequence[Recipe]) -> list[Candidate | None]:
        """Return layouts planned in full."""
        if self._pool is None:
            return [self._job.plan_whole(recipe) for recipe in recipes]
        return list(self._pool.map(_plan_whole, recipes))


def _result(found: Future[Found] | Found) -> Found:
    return found.result() if isinstance(found, Future) else found
