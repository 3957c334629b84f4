"""The types a config field may have, and how each is shown to a user and in JSON Schema."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs

_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("boolean", "true or false"),
    int: ("integer", "an integer"),
    float: ("number", "a number"),
    str: ("string", "a string"),
}
_TOML_NAMES = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array", dict: "table"}


def field_types(config: type) -> dict[str, Any]:
    """Return field name -> type of an attrs class, with string annotations evaluated."""
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in attrs.fields(config)}


def is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def is_literal(type_: Any) -> bool:
    return get_origin(type_) is Literal


def is_mapping(type_: Any) -> bool:
    return get_origin(type_) is Mapping


def is_tuple(type_: Any) -> bool:
    return get_origin(type_) is tuple


def members(type_: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union without None, which TOML cannot write."""
    return tuple(member for member in get_args(type_) if member is not type(None))


def expected(type_: Any) -> str:
    """Describe what a value of ``type_`` looks like in TOML: ``an integer``."""
    if type_ in _SCALARS:
        return _SCALARS[type_][1]
    if is_literal(type_):
        return "one of " + ", ".join(map(_toml, get_args(type_)))
    if is_tuple(type_):
        return 'an array of strings (["..."])' if get_args(type_) == (str, ...) else "an array"
    if is_union(type_):
        return " or ".join(expected(member) for member in members(type_))
    return "a table"


def found(value: Any) -> str:
    """Describe what is in the file instead: ``the string 'x'``."""
    name = _TOML_NAMES.get(type(value), type(value).__name__)
    return f"the {name}" if isinstance(value, list | dict) else f"the {name} {_toml(value)}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _any_table(_: type) -> dict[str, Any]:
    return {"type": "object"}


def type_schema(type_: Any, table: Callable[[type], dict[str, Any]] = _any_table) -> dict[str, Any]:
    """Return the draft-07 JSON Schema of a field's type; ``table`` returns that of an attrs class in it.

    Raises:
        TypeError: a recipe cannot represent that type.
    """
    arguments = get_args(type_)
    if type_ in _SCALARS:
        return {"type": _SCALARS[type_][0]}
    if is_literal(type_):
        return {"enum": list(arguments)}
    if is_union(type_):
        choices = [type_schema(member, table) for member in members(type_)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if is_tuple(type_):
        return _array_schema(arguments, table)
    if is_mapping(type_) and arguments[0] is str:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], table)}
    if isinstance(type_, type) and attrs.has(type_):
        return table(type_)
    raise TypeError(_unsupported(type_))


def _array_schema(types: tuple[Any, ...], table: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
    if len(types) == 2 and types[1] is Ellipsis:
        return {"type": "array", "items": type_schema(types[0], table)}
    items = [type_schema(type_, table) for type_ in types]
    return {"type": "array", "items": items, "minItems": len(types), "maxItems": len(types)}


def _unsupported(type_: Any) -> str:
    name = type_.__name__ if isinstance(type_, type) and not get_args(type_) else str(type_)
    return (
        f"{name} is no type of a recipe: use bool, int, float, str, Literal, tuple, Mapping[str, ...], "
        "a frozen attrs class, or a union of these"
    )


def check_config_types(config: type) -> None:
    """Check that a recipe can represent every field of an attrs class.

    Raises:
        TypeError: it cannot; the text names class and field.
        NameError: an annotation names something its module does not import at run time.
    """
    for name, type_ in field_types(config).items():
        try:
            type_schema(type_)
        except TypeError as error:
            raise TypeError(f"{config.__name__}.{name}: {error}") from None
        for part in (type_, *get_args(type_)):
            if isinstance(part, type) and attrs.has(part):
                check_config_types(part)
