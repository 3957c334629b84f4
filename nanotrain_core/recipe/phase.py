"""The ``[[phase]]`` section: values of other sections from some token on, constant or ramped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.range_validator import Range
from nanotrain_core.recipe.types import field_types

#: Marks a number or table of a config that a phase may change: ``attrs.field(metadata={CHANGEABLE: True})``.
#: It must not affect the shapes of parameters. The core applies changes of ``[batch]`` and
#: ``optimizer.lr``; a model applies its own: :class:`~nanotrain_core.contracts.ChangesInRun`.
CHANGEABLE = "nanotrain_changes"
#: Marks a field that a phase may change only from one constant to another: a ramp is rejected.
CONSTANT = "nanotrain_constant"
#: Sections whose keys a phase can change, where they are marked.
SECTIONS = ("batch", "model", "optimizer")
#: The maximum number of tokens of a run.
MOST_TOKENS = 10**18


def changeable(config: type) -> tuple[str, ...]:
    """Return the fields of a config that a phase may change."""
    return tuple(field.name for field in attrs.fields(config) if field.metadata.get(CHANGEABLE))


def takes_ramp(config: type, name: str) -> bool:
    """Return whether a field is a number that a phase may ramp."""
    constant = attrs.fields_dict(config)[name].metadata.get(CONSTANT)
    return field_types(config)[name] in (int, float) and not constant


@attrs.define(frozen=True, kw_only=True)
class Ramp:
    """A number that changes over the tokens of its phase: ``{ end = 2.2e-5, shape = "cosine" }``."""

    start: int | float | None = None
    """Value at the phase's first token. Unset: the previous value."""
    end: int | float
    """Value after the phase's last token, which then stays."""
    shape: Literal["linear", "cosine"] = "linear"
    """`cosine` is half a period: slow at both ends."""
    by: int | float | None = attrs.field(default=None, validator=Range(0.0, 1e300, above=True))
    """Granularity of the steps in which it changes. Unset: 1 for integers, and none for other numbers."""

    def at(self, progress: float, start: float) -> float:
        """Return the value at ``progress`` through the phase, from 0 to 1, beginning with ``start``."""
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
    """Its name in the log."""
    until_tokens: int | None = attrs.field(default=None, validator=Range(1, MOST_TOKENS))
    """Tokens of the whole run at which the next phase begins. The last phase may omit it."""
    changes: Mapping[str, Any] = attrs.field(factory=FrozenMapping, converter=_frozen)
    """Key of the recipe -> its value from this phase on: ``optimizer.lr``, ``batch.length``, ``model.yarn``.
    Each is a number, a :class:`Ramp` of numbers, or the config of a table."""

    def table(self) -> dict[str, Any]:
        """Return it as written in a recipe: keys of a section below that section.

        The name, even if empty, is a key of the table itself: TOML has no header for an array item that has
        only subtables, and these would be parsed as part of the previous item.
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
