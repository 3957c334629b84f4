"""The order in which ``--set`` options are merged: one that chooses a component before those of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nanotrain_core.recipe.source import Source

_Path = tuple[str, ...]


def components_first(overrides: Iterable[Source]) -> list[Source]:
    """Return a source for each value that ``overrides`` set, in the order in which to merge them.

    It is that of the options, but another component drops the keys of its table: each ``use`` moves before
    the first option that sets other keys there, if none in between replaces the table or one around it.
    """
    ordered: list[tuple[_Path, Source]] = []
    for override in overrides:
        for path, value in _values(override.data):
            data: Any = value
            for key in reversed(path):
                data = {key: data}
            index = _place_of_use(path[:-1], ordered) if path[-1] == "use" else len(ordered)
            ordered.insert(index, (path, Source(override.label, data)))
    return [source for _, source in ordered]


def _place_of_use(table: _Path, ordered: list[tuple[_Path, Source]]) -> int:
    index = len(ordered)
    for number, (path, _) in reversed([*enumerate(ordered)]):
        if table[: len(path)] == path:
            break
        if path[: len(table)] == table and path != (*table, "use"):
            index = number
    return index


def _values(tables: dict[str, Any], around: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield the path and the value of everything that is no table, and of empty tables."""
    for key, value in tables.items():
        if isinstance(value, dict) and value:
            yield from _values(value, (*around, key))
        else:
            yield (*around, key), value
