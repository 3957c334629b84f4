"""Resolves the types of ``[[phase]]`` from the sections whose keys it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from nanotrain_core.errors import Problem, did_you_mean
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe.locate import join
from nanotrain_core.recipe.phase import SECTIONS, Phase, Ramp, changeable, takes_ramp
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.recipe.types import expected, field_types, found
from nanotrain_core.recipe.write import plain

#: Keys that users may want to change, and why they cannot.
FIXED = {
    "optimizer.lr_schedule": "it counts steps of the whole run; let optimizer.lr move over the tokens of a "
    'phase: lr = { end = 1e-5, shape = "cosine" }',
}


class PhaseTables:
    """The phases of a recipe whose other sections are already typed."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        """``sections``: ``batch`` and the selections of a recipe, by name."""
        self.problems: list[Problem] = []
        self._configs = {
            name: sections[name] if name == "batch" else sections[name].config for name in SECTIONS
        }
        self._keys = [
            f"{name}.{field}"
            for name, config in self._configs.items()
            for field in changeable(type(config))
            if name != "optimizer" or field == "lr"  # the only one that the core applies
        ]

    def phases(self, tables: Any) -> tuple[Phase, ...]:
        """Return the phases of an array of tables; ``problems`` has what is wrong with it."""
        if not isinstance(tables, list):
            self.problems.append(Problem("phase", "expected an array of tables: write [[phase]]"))
            return ()
        phases = tuple(self._phase(table, join("phase", number)) for number, table in enumerate(tables))
        if not self.problems:
            self.problems += _order(phases)
        return () if self.problems else phases

    def _phase(self, table: Any, key: str) -> Phase:
        if not isinstance(table, dict):
            self.problems.append(Problem(key, f"expected a table: write [[phase]], got {found(table)}"))
            return Phase()
        own = {field.name for field in attrs.fields(Phase)} - {"changes"}
        head, problems = structure({name: table[name] for name in own & table.keys()}, Phase, key)
        self.problems += problems
        changes: dict[str, Any] = {}
        for section, fields in table.items():
            if section in own:
                continue
            if section in SECTIONS and not isinstance(fields, dict):
                text = f"expected a table, such as {section}.KEY = 1, got {found(fields)}"
                self.problems.append(Problem(join(key, section), text))
                continue
            if section not in SECTIONS:
                lacks = [each for each in self._keys if each.endswith(f".{section}")]  # only its section
                near = did_you_mean(lacks[0], lacks) if lacks else did_you_mean(section, [*own, *SECTIONS])
                text = f"no table of what changes{near}; valid: name, until_tokens, {', '.join(self._keys)}"
                self.problems.append(Problem(join(key, section), text))
                continue
            for name, value in fields.items():
                changes[f"{section}.{name}"] = self._value(f"{section}.{name}", value, key)
        return Phase() if head is None or problems else attrs.evolve(head, changes=changes)

    def _value(self, name: str, value: Any, phase: str) -> Any:
        """Return the typed value for its section's config, or a :class:`Ramp` of numbers."""
        key = join(phase, name)
        if name not in self._keys:
            reason = f": {FIXED[name]}" if name in FIXED else self._near(name)
            text = f"'{name}' cannot change in a run{reason}; what can: {', '.join(self._keys)}"
            self.problems.append(Problem(key, text))
            return None
        section, _, field = name.partition(".")
        config = type(self._configs[section])
        number = field_types(config)[field] in (int, float)
        if not isinstance(value, dict) or not number:
            return self._checked(name, value, key)
        if not takes_ramp(config, field):
            text = f"expected {expected(field_types(config)[field])}: it does not move along a ramp"
            self.problems.append(Problem(key, text))
            return None
        ramp, problems = structure(value, Ramp, key)
        self.problems += problems
        if ramp is None or problems:
            return None
        for end in ("start", "end"):
            if end in value:
                self._checked(name, value[end], join(key, end))
        if field_types(config)[field] is int and ramp.by is not None and ramp.by != int(ramp.by):
            self.problems.append(Problem(join(key, "by"), f"expected an integer, got {ramp.by:g}"))
        return ramp

    def _near(self, name: str) -> str:
        """Return the nearest key of the same section, as a clause."""
        section, _, field = name.partition(".")
        own = [key for key in self._keys if key.startswith(f"{section}.")]
        return did_you_mean(name, own) if did_you_mean(field, [key.partition(".")[2] for key in own]) else ""

    def _checked(self, name: str, value: Any, key: str) -> Any:
        """Return ``value`` as its config converts it; problems are recorded under ``key``."""
        section, _, field = name.partition(".")
        config = self._configs[section]
        changed, problems = structure({**plain(config), field: value}, type(config), "")
        known = structure(plain(config), type(config), "")[1]  # recorded as the section's own
        for problem in (each for each in problems if each not in known):
            below = problem.key.removeprefix(field).removeprefix(".")
            self.problems.append(attrs.evolve(problem, key=join(key, below) if below else key))
        return None if changed is None else getattr(changed, field)


def _order(phases: tuple[Phase, ...]) -> Iterator[Problem]:
    """Check that phases follow one another, and that ramps have an end."""
    before = 0
    for number, phase in enumerate(phases):
        key, ends = join("phase", number), phase.until_tokens
        if ends is None and number < len(phases) - 1:
            yield Problem(f"{key}.until_tokens", "missing; only the last phase may have no end")
        if ends is not None and ends <= before:
            text = f"expected more than the {before} tokens of the phases before, got {ends}"
            yield Problem(f"{key}.until_tokens", text)
        ramps = [name for name, value in phase.changes.items() if isinstance(value, Ramp)]
        if ramps and ends is None:
            yield Problem(f"{key}.until_tokens", f"missing; {ramps[0]} moves until then")
        before = max(before, ends or 0)


def steps_of(recipe: Recipe) -> int | None:
    """Return the total steps of all phases of a recipe; None if the last has no end."""
    timeline = PhaseTimeline(recipe)
    return None if timeline.ends is None else sum(each.steps for each in timeline.stretches())


def key_in_force(recipe: Recipe, number: int, key: str) -> str:
    """Return where a recipe sets ``key`` for a phase: in it, in an earlier one, or in its section.

    For phase 1 and ``batch.sequences``, which phase 0 sets, ``phase.0.batch.sequences``.
    """
    for earlier in range(number, -1, -1):
        if key in recipe.phase[earlier].changes:
            return f"phase.{earlier}.{key}"
    return key
