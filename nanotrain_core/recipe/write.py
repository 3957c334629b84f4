"""Writes a resolved recipe as TOML: complete, so that the file alone reproduces the run."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import attrs
import tomli_w

from nanotrain_core.component import LISTED_KINDS
from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.locate import key_lines, leaves_of
from nanotrain_core.recipe.merge import Merged
from nanotrain_core.recipe.phase import Phase
from nanotrain_core.recipe.secrets import HIDDEN, has_password, is_secret
from nanotrain_core.recipe.tree import Recipe, Selection


def write_resolved(recipe: Recipe) -> str:
    """Return ``recipe`` as TOML with every default written out. Loading it gives an equal recipe."""
    tables = _tables(recipe)
    for optional in ("requires", "versions", "phase"):
        if not tables[optional]:
            del tables[optional]
    # TOML requires plain keys before the first table: here, requirements and the kinds with no component.
    arrays = {name: value for name, value in tables.items() if not value or name == "requires"}
    return _dump(arrays | tables)


def _tables(recipe: Recipe) -> dict[str, Any]:
    return {field.name: plain(getattr(recipe, field.name)) for field in attrs.fields(Recipe)}


def _dump(tables: dict[str, Any]) -> str:
    """Return TOML with one ``[[kind]]`` for each item of a listed kind.

    tomli-w would write short items on one line. So items are written as tables with numeric
    names, whose headers are then replaced.
    """
    listed = (*sorted(LISTED_KINDS), "phase")
    for kind in listed:
        if tables.get(kind):
            tables[kind] = {str(number): table for number, table in enumerate(tables[kind])}
    kinds = "|".join(listed)
    text = re.sub(rf"^\[({kinds})\.\d+\]$", r"[[\1]]", tomli_w.dumps(tables), flags=re.MULTILINE)
    # A table, or an array of tables, of the last item.
    return re.sub(rf"^(\[\[?)({kinds})\.\d+\.", r"\1\2.", text, flags=re.MULTILINE)


def write_model(selection: Selection) -> str:
    """Return the table ``[model]`` of a selected model, every default written out: a recipe can extend it."""
    return tomli_w.dumps({"model": plain(selection)})


def recipe_hash(recipe: Recipe) -> str:
    """Return the SHA-256 of the resolved recipe with its versions: equal on all ranks of a run."""
    return hashlib.sha256(write_resolved(recipe).encode()).hexdigest()


def recipe_values(recipe: Recipe) -> dict[str, str]:
    """Return the value of each dotted key of the resolved recipe, such as ``monitor.0.every``, as a text.

    Of a secret, the beginning of its SHA-256: it can be compared, and shown.
    """
    leaves = leaves_of(_tables(recipe))
    return {key: _shown(key.rpartition(".")[2], str(value)) for key, value in leaves}


def _shown(name: str, value: str) -> str:
    hidden = is_secret(name) or has_password(value)
    return f"{HIDDEN}, sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]}" if hidden else value


def explain(recipe: Recipe, merged: Merged) -> str:
    """Return the resolved recipe with a comment on each value that gives its origin."""
    text = write_resolved(attrs.evolve(recipe, versions={}))
    lines = text.splitlines()
    width = min(48, max(map(len, lines)))
    for key, number in key_lines(text).items():
        line = lines[number - 1]
        if "=" in line and "  # " not in line and not line.startswith("["):
            lines[number - 1] = f"{line:{width}}  # {_origin(merged, key)}"
    return "\n".join(lines) + "\n"


def _origin(merged: Merged, key: str) -> str:
    origin = merged.origin(key)
    return "default" if origin is None else origin.place(key)


def plain(value: Any) -> Any:
    """Return attrs classes and mappings as dicts without None, tuples as lists."""
    if isinstance(value, Phase):
        return value.table()
    if isinstance(value, Selection):
        return {"use": value.use, **plain(value.config)}
    if attrs.has(type(value)):
        pairs = ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, FrozenMapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value
