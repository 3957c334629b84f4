"""The shape of ``[[phase]]``: numbers of other sections from some token on, constant or moving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.ranges import Range
from nanotrain_core.recipe.types import field_types

#: Marks a number or table of a config that a phase may change: ``attrs.field(metadata={CHANGES: True})``.
#: It must do nothing to the shapes of parameters. The core applies those of ``[batch]`` and
#: ``optimizer.lr``; a model does its own: :class:`~nanotrain_core.contracts.ChangesInRun`.
CHANGES = "nanotrain_changes"
#: Marks one that a phase may change, but only from one constant to another: a ramp of it is refused.
CONSTANT = "nanotrain_constant"
#: Sections whose keys a phase can change, where they are marked.
SECTIONS = ("batch", "model", "optimizer")
#: The most tokens of a run: more than anybody has.
MOST_TOKENS = 10**18


def changeable(config: type) -> tuple[str, ...]:
    """Return the fields of a config that a phase may change."""
    return tuple(field.name for field in attrs.fields(config) if field.metadata.get(CHANGES))


def takes_ramp(config: type, name: str) -> bool:
    """Return whether a field is a number that a phase may move from one value to another."""
    constant = attrs.fields_dict(config)[name].metadata.get(CONSTANT)
    return field_types(config)[name] in (int, float) and not constant


@attrs.define(frozen=True, kw_only=True)
class Ramp:
    """A number that moves over the tokens of its phase: ``{ end = 2.2e-5, shape = "cosine" }``."""

    start: int | float | None = None
    """Value at the phase's first token. Unset: the one that was in force before."""
    end: int | float
    """Value behind the phase's last token, which stays."""
    shape: Literal["linear", "cosine"] = "linear"
    """`cosine` is half of a period: slow at both ends."""
    by: int | float | None = attrs.field(default=None, validator=Range(0.0, 1e300, above=True))
    """Size of the steps in which it moves. Unset: 1 for integers, and none for other numbers."""

    def at(self, progress: float, start: float) -> float:
        """Return the value at ``progress`` through the phase, from 0 to 1, where it begins from ``start``."""
        if progress >= 1:
            return self.end
        way = (1 - math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else progress
        moved = abs(self.end - start) * way
        if self.by is not None:
            moved = math.floor(moved / self.by + 1e-9) * self.by
        return start + math.copysign(moved, self.end - start)


def _frozen(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return FrozenMapping(changes)


@attrs.define(frozen=True, kw_only=True)
class Phase:
    """An item of ``[[phase]]``: in force until the run has trained on ``until_tokens``."""

    name: str = ""
    """What the log calls it."""
    until_tokens: int | None = attrs.field(default=None, validator=Range(1, MOST_TOKENS))
    """Tokens of the whole run at which the next phase begins. The last phase may do without."""
    changes: Mapping[str, Any] = attrs.field(factory=FrozenMapping, converter=_frozen)
    """Key of the recipe -> its value from this phase on: ``optimizer.lr``, ``batch.length``, ``model.yarn``.
    That is a number, a :class:`Ramp` of numbers, or the config of a table."""

    def table(self) -> dict[str, Any]:
        """Return it as it stands in a recipe: keys of a section below that section.

        The name, even if empty, is a key of the table itself: TOML has no header for an array's item that has
        tables alone, and these would be read as those of the item before.
        """
        found: dict[str, Any] = {"name": self.name}
        if self.until_tokens is not None:
            found["until_tokens"] = self.until_tokens
        for key, value in self.changes.items():
            section, _, name = key.partition(".")
            plain = attrs.asdict(value, filter=_is_set) if attrs.has(type(value)) else value
            found.setdefault(section, {})[name] = plain
        return found


def _is_set(field: Any, value: Any) -> bool:
    return value is not None
