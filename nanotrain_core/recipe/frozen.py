"""An immutable mapping for free-form TOML tables in a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

V = TypeVar("V")


class FrozenMapping(Mapping[str, V]):
    """Hashable, picklable and equal to any mapping with the same items.

    ``types.MappingProxyType`` is not sufficient: it cannot be pickled or, before Python 3.12, hashed.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __reduce__(self) -> tuple[type[FrozenMapping[Any]], tuple[dict[str, V]]]:
        return FrozenMapping, (self._items,)

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"
