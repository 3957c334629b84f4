"""The JSON Schema of recipes, generated from the installed plugins, for completion and checks in editors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs

from nanotrain_core.component import KINDS, LISTED_KINDS, Component
from nanotrain_core.recipe.phase import SECTIONS, Phase, Ramp, changeable, takes_ramp
from nanotrain_core.recipe.range_validator import Range
from nanotrain_core.recipe.tree import CORE_SECTIONS, BatchConfig
from nanotrain_core.recipe.types import field_types, type_schema
from nanotrain_core.registry.registry import Registry

Schema = dict[str, Any]


def recipe_schema(registry: Registry) -> Schema:
    """Return a draft-07 schema of a recipe file.

    ``use`` selects the definition that the rest of a table must match; a table without ``use``, as
    in a recipe that extends another, must match one of that kind. Draft 07 because editors support it.
    """
    definitions: Schema = {}
    properties: Schema = {
        "extends": {"type": "string", "description": "Recipe that this one is laid over."},
        "requires": {"type": "array", "items": {"type": "string"}},
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
        **{name: _table(config) for name, config in CORE_SECTIONS.items()},
    }
    for kind in KINDS:
        components = [registry.get(kind, name) for name in registry.names(kind)]
        definitions |= {f"{kind}.{c.name}": _component(c) for c in components}
        section = _section(kind, components)
        properties[kind] = {"type": "array", "items": section} if kind in LISTED_KINDS else section
    properties["phase"] = {"type": "array", "items": _phase(registry)}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "nanotrain recipe",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": ["batch", "model"], "anyOf": [{"required": ["run"]}, {"required": ["phase"]}]},
        "definitions": definitions,
    }


def _phase(registry: Registry) -> Schema:
    """Return the schema of ``[[phase]]``: the keys that it may change, as number, ramp or table."""
    phase = _table(Phase, without="changes")
    for kind in SECTIONS:
        configs: list[type] = [BatchConfig]
        if kind in KINDS:
            configs = [registry.get(kind, name).config for name in registry.names(kind)]
        tables = [(config, _table(config)["properties"]) for config in configs]
        values = {
            name: {"anyOf": [fields[name], _table(Ramp)], "description": fields[name].get("description", "")}
            if takes_ramp(config, name)
            else fields[name]
            for config, fields in tables
            for name in changeable(config)
        }
        phase["properties"][kind] = {"type": "object", "properties": values, "additionalProperties": False}
    return phase


def _section(kind: str, components: list[Component]) -> Schema:
    references = {c.name: {"$ref": f"#/definitions/{kind}.{c.name}"} for c in components}
    chosen = [
        {"if": {"properties": {"use": {"const": name}}, "required": ["use"]}, "then": reference}
        for name, reference in references.items()
    ]
    unnamed = {"if": {"not": {"required": ["use"]}}, "then": {"anyOf": list(references.values())}}
    return {
        "type": "object",
        "properties": {"use": {"enum": list(references), "description": f"Which {kind}."}},
        "allOf": [*chosen, unnamed],
    }


def _component(component: Component) -> Schema:
    schema = _table(component.config)
    schema["description"] = component.summary
    schema["properties"] = {"use": {"const": component.name}, **schema["properties"]}
    return schema


def _table(config: type, without: str = "") -> Schema:
    """Return the schema of an attrs class: types, defaults and attribute docstrings, without one field."""
    types, texts = field_types(config), field_docs(config)
    properties = {}
    for field in (field for field in attrs.fields(config) if field.name != without):
        schema = type_schema(types[field.name], _table)
        for validator in getattr(field.validator, "_validators", (field.validator,)):  # joined by and_()
            if isinstance(validator, Range):
                items = schema.get("items", schema)
                for each in items if isinstance(items, list) else [items]:
                    each.update(validator.schema())
        if field.name in texts:
            schema["description"] = texts[field.name]
        if isinstance(field.default, bool | int | float | str):
            schema["default"] = field.default
        properties[field.name] = schema
    return {"type": "object", "properties": properties, "additionalProperties": False}


def field_docs(config: type) -> dict[str, str]:
    """Return field name -> the string literal under it, of a class and its bases.

    Python discards these strings, so they are read from the source, where available.
    """
    texts: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if attrs.has(cls):
            texts |= dict(_docs_in(cls))
    return texts


def _docs_in(cls: type) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for field, text in pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, inspect.cleandoc(words)
