"""Merges the sources of a recipe and records the origin of each value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard

from nanotrain_core.errors import Problem
from nanotrain_core.recipe.locate import join, keys_of
from nanotrain_core.recipe.source import Source


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables; one that uses another component replaces the one below, all else but tables replaces."""
    merged = dict(below)
    for key, value in above.items():
        old: Any = merged.get(key)
        merged[key] = merge_tables(old, value) if _extends(value, old) else value
    return merged


def _extends(above: Any, below: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether both are tables of one component: the keys of another would be meaningless."""
    if not isinstance(above, Mapping) or not isinstance(below, Mapping):
        return False
    return bool(above.get("use", below.get("use")) == below.get("use"))


class Merged:
    """The tables of a whole recipe, not yet typed.

    Tables merge, anything else replaces. A table whose ``use`` changes is replaced completely: the keys
    of another component would be meaningless. A table with numeric keys (``parallel.0.overlap=false``)
    changes items of an array, and the index after the last one appends.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.problems: list[tuple[Source, Problem]] = []
        self._origins: dict[str, Source] = {}
        self.label = ""
        self.own_ranks: tuple[Any, str] | None = None
        """``run.ranks`` as the recipe itself says it, and where: another number of ranks replaces it."""

    def add(self, source: Source) -> None:
        """Merge ``source`` over the current tables."""
        for name, value in source.data.items():
            self.tree[name] = self._merge(self.tree.get(name), value, name, source)
        self.label = self.label if source.label.startswith("--") else source.label

    def origin(self, key: str) -> Source | None:
        """Return the source that set ``key``, or None if it has its default."""
        return self._origins.get(key)

    def place(self, key: str) -> str:
        """Return ``file:line`` or the option at which ``key``, or the nearest enclosing table, was set."""
        near = key
        while near and near not in self._origins:
            near = near.rpartition(".")[0]
        origin = self._origins.get(near)
        return self.label if origin is None or origin.label == "default" else origin.place(key)

    def _merge(self, base: Any, over: Any, key: str, source: Source) -> Any:
        if isinstance(base, list) and isinstance(over, dict) and over and all(map(str.isdigit, over)):
            return self._merge_items(base, over, key, source)
        if not _extends(over, base):
            self._record(over, key, source)
            return copy.deepcopy(over)
        self._origins[key] = source
        return base | {
            name: self._merge(base.get(name), value, join(key, name), source) for name, value in over.items()
        }

    def _merge_items(self, base: list[Any], over: dict[str, Any], key: str, source: Source) -> list[Any]:
        items = list(base)
        for number, value in sorted(over.items(), key=lambda pair: int(pair[0])):
            index = int(number)
            if index > len(items):
                text = f"there is no item {index}; the next free number is {len(items)}"
                self.problems.append((source, Problem(join(key, number), text)))
                continue
            items[index:] = [
                self._merge(items[index] if index < len(items) else None, value, join(key, index), source),
                *items[index + 1 :],
            ]
        return items

    def _record(self, value: Any, key: str, source: Source) -> None:
        """Record ``source`` as the origin of ``key`` and everything below it, replacing earlier origins."""
        for old in [old for old in self._origins if old == key or old.startswith(f"{key}.")]:
            del self._origins[old]
        self._origins.update(dict.fromkeys(keys_of(value, key), source))
