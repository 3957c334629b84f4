"""Schedules that remember their stages and lists: many layouts ask for the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs

from nanotrain_core.api import Action, Registry, Selection
from nanotrain_plan.dry.rank import Sort, sorts_of

#: Lists of a schedule that are remembered, each of some thousand actions.
MOST = 64


class RememberedSchedules:
    """The plugins, with schedules that are asked once: they are pure functions."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._schedules: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def build(self, selection: Selection) -> Any:
        """Return the component; of a schedule, one that remembers."""
        if selection.kind != "schedule":
            return self._registry.build(selection)
        key = repr(selection)
        if key not in self._schedules:
            self._schedules[key] = _Remembered(self._registry.build(selection))
        return self._schedules[key]


class _Remembered:
    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self.parts = lru_cache(MOST)(schedule.parts)
        self.actions = lru_cache(MOST)(schedule.actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


@attrs.define(frozen=True)
class Lists:
    """Actions of every pipeline rank."""

    actions: tuple[tuple[Action, ...], ...]
    sorts: Sequence[Mapping[Action, Sort]]
    split: frozenset[tuple[int, int]]
    """Stages and microbatches that have a W pass."""


def lists_of(schedule: Any, pp: int, microbatches: int, *, apart: bool = True) -> Lists:
    """Return the actions of a schedule and their sorts; without W passes if not ``apart``."""
    actions = tuple(map(tuple, schedule.actions(pp, microbatches)))
    if not apart:
        actions = tuple(tuple(a for a in own if a.kind != "W") for own in actions)
    sorts = [sorts_of(own, microbatches) for own in actions]
    split = frozenset((a.stage, a.microbatch) for own in actions for a in own if a.kind == "W")
    return Lists(actions, sorts, split)
