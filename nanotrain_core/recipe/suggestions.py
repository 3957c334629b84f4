"""Suggestions for errors in a recipe where the nearest name is not enough. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

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


def with_section(name: str, sections: Mapping[str, Any]) -> str:
    """Return `` (did you mean 'run.steps'?)`` for a key that lacks its section, else an empty string.

    Args:
        sections: of the resolved recipe, tuples where a recipe lists several; None for an invalid one.
    """
    for section, value in sections.items():
        items = enumerate(value) if isinstance(value, tuple) else (("", value),)
        for number, item in items:
            shape = CORE_SECTIONS.get(section) or type(getattr(item, "config", None))
            if attrs.has(shape) and name in attrs.fields_dict(shape):
                return f" (did you mean '{section}.{number}.{name}'?)".replace("..", ".")
    return ""


def as_written(message: str) -> str:
    """Format table names, which a TOML reader gives as Python tuples, as in the file: ``[model]``."""
    return re.sub(r"\('([^()]*)',?\)", lambda found: "[" + found[1].replace("', '", ".") + "]", message)
