"""Suggestions for errors in a recipe where the nearest name is not enough. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from nanotrain_core.component import KINDS, LISTED_KINDS
from nanotrain_core.layout.layout import Layout
from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.divisibility import divisibility_of
from nanotrain_core.recipe.tree import CORE_SECTIONS, Selection
from nanotrain_core.registry.registry import Registry


def for_idle_ranks(dim: str, model: Selection, layout: Layout, registry: Registry) -> str:
    """Return a clause with the components that would use the ranks along ``dim``, or that none can."""
    if dim in layout.expert_dims:
        divisibility = divisibility_of(model.config)
        if divisibility is not None and not any(Role.EXPERTS in extent.roles for extent in divisibility):
            return f"nor has model '{model.use}' experts: set {dim} = 1"
    added = registry.remedies(dim)
    return f"write {added}, or set {dim} = 1" if added else f"nor does an installed one: set {dim} = 1"


def with_section(name: str, tree: Mapping[str, Any], registry: Registry) -> str:
    """Return `` (did you mean 'run.steps'?)`` for a key that lacks its section, or stands in another one.

    An empty string if no section of the recipe has that key.
    """
    for section, shape in _shapes(tree, registry):
        if name in attrs.fields_dict(shape):
            return f" (did you mean '{section}.{name}'?)"
    return ""


def of_another(name: str, kind: str, registry: Registry) -> str:
    """Return a clause that names the components of a kind that have a key, or an empty string."""
    configs = {use: registry.get(kind, use).config for use in registry.names(kind)}
    having = [f"'{use}'" for use, config in configs.items() if name in attrs.fields_dict(config)]
    return f": it is a key of {kind} {', '.join(having)}" if having else ""


def _shapes(tree: Mapping[str, Any], registry: Registry) -> Iterator[tuple[str, type]]:
    """Yield the config class of each table of a recipe, of which some may be invalid."""
    yield from CORE_SECTIONS.items()
    for kind in KINDS:
        tables = tree.get(kind)
        for number, table in enumerate(tables if isinstance(tables, list) else [tables]):
            use = table.get("use") if isinstance(table, dict) else None
            if use in registry.names(kind):
                key = f"{kind}.{number}" if kind in LISTED_KINDS else kind
                yield key, registry.get(kind, use).config


def as_written(message: str) -> str:
    """Format table names, which a TOML reader gives as Python tuples, as in the file: ``[model]``."""
    return re.sub(r"\('([^()]*)',?\)", lambda found: "[" + found[1].replace("', '", ".") + "]", message)
