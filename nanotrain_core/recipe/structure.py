"""Converts plain tables into typed, frozen configs, strictly, and reports precisely what does not fit."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol, get_args, runtime_checkable

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.errors import IterableValidationNote
from cattrs.gen import make_dict_structure_fn

from nanotrain_core.errors import Problem, describe, did_you_mean
from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.locate import join
from nanotrain_core.recipe.merge import Merged
from nanotrain_core.recipe.types import (
    expected,
    field_types,
    found,
    is_literal,
    is_mapping,
    is_tuple,
    is_union,
    members,
)

#: Python's integers are unbounded: values beyond these are not valid in a recipe.
LARGEST_FLOAT, LARGEST_INTEGER = 10**300, 2**63


@runtime_checkable
class ExplainsKeys(Protocol):
    """Optional interface of a config class, in any table: the class, not its instances, has the attribute."""

    NOT_KEYS: Mapping[str, str]
    """Why names that users are likely to try are not keys: name -> a clause of the error."""


def structure(
    table: Any, config: type, key: str, elsewhere: Callable[[str], str] = lambda name: ""
) -> tuple[Any, list[Problem]]:
    """Return an instance of the attrs class ``config`` built from ``table``, and the problems found.

    The instance is None if the types do not fit; validators run only when they do.

    Args:
        key: location of the table in the recipe, for the problems.
        elsewhere: returns a clause on where an unknown key belongs instead, or an empty string.
    """
    try:
        # Validators run afterwards, so that each failure is reported, with its own key.
        with attrs.validators.disabled():
            instance: Any = _converter().structure(table, config)
    except Exception as error:
        return None, list(_problems(error, key, elsewhere))
    return instance, list(_invalid(instance, key))


def absolute_paths(table: Any, config: type, key: str, merged: Merged) -> Any:
    """Return ``table`` with the paths of ``path_field`` fields made absolute, relative to their file."""
    if not isinstance(table, dict):
        return table
    result = dict(table)
    for field in attrs.fields(config):
        origin = merged.origin(join(key, field.name))
        if field.metadata.get("nanotrain") == "path" and origin is not None and field.name in table:
            result[field.name] = _absolute(table[field.name], origin.folder, field.metadata["words"])
    return result


def _absolute(value: Any, folder: os.PathLike[str], words: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_absolute(item, folder, words) for item in value]
    if isinstance(value, str) and value not in words:
        return os.path.normpath(os.path.join(folder, value))
    return value


@cache
def _converter() -> Converter:
    """Return cattrs without its coercions, which would turn ``"false"`` into true and 3.7 into 3."""
    converter = Converter(forbid_extra_keys=True)
    for scalar in (bool, int, float, str):
        converter.register_structure_hook(scalar, _scalar)
    converter.register_structure_hook_func(is_literal, _literal)
    converter.register_structure_hook_func(is_tuple, lambda v, t: _tuple(converter, v, t))
    converter.register_structure_hook_func(is_mapping, lambda v, t: _mapping(converter, v, t))
    converter.register_structure_hook_func(is_union, lambda v, t: _union(converter, v, t))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _table(converter, cls))
    return converter


def _scalar(value: Any, type_: type) -> Any:
    if type_ is float and type(value) is int:
        value = float(value) if abs(value) < LARGEST_FLOAT else math.inf
    if type(value) is not type_:
        raise TypeError(_mismatch(value, type_))
    match value:
        case float() if not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value}")
        case int() if abs(value) >= LARGEST_INTEGER:
            raise ValueError("expected an integer of 64 bits, as TOML's are")
        case str() if "\0" in value:
            raise ValueError("expected text without the character NUL")
    return value


def _mismatch(value: Any, type_: Any) -> str:
    return f"expected {expected(type_)}, got {found(value)}"


def _literal(value: Any, type_: Any) -> Any:
    for choice in get_args(type_):
        if type(choice) is type(value) and choice == value:
            return choice
    near = did_you_mean(value, [str(c) for c in get_args(type_)]) if isinstance(value, str) else ""
    raise ValueError(_mismatch(value, type_) + near)


def _tuple(converter: Converter, value: Any, type_: Any) -> tuple[Any, ...]:
    wanted = get_args(type_)
    if not isinstance(value, list):
        raise TypeError(_mismatch(value, type_))
    if wanted[-1] is Ellipsis:
        wanted = wanted[:1] * len(value)
    if len(wanted) != len(value):
        raise ValueError(f"expected an array of {len(wanted)} items, got {len(value)}")
    items, errors = [], []
    for index, (item, item_type) in enumerate(zip(value, wanted, strict=True)):
        try:
            items.append(converter.structure(item, item_type))
        except Exception as error:
            error.add_note(IterableValidationNote(f"item {index}", index, item_type))
            errors.append(error)
    if errors:
        raise IterableValidationError("wrong items", errors, type_)
    return tuple(items)


def _mapping(converter: Converter, value: Any, type_: Any) -> FrozenMapping[Any]:
    if not isinstance(value, dict):
        raise TypeError(_mismatch(value, type_))
    plain: Any = types.GenericAlias(dict, get_args(type_))
    return FrozenMapping(converter.structure(value, plain))


def _union(converter: Converter, value: Any, type_: Any) -> Any:
    """Convert to the first member that fits; a union with only one member reports what does not fit."""
    choices = members(type_)
    for choice in choices[:-1]:
        try:
            return converter.structure(value, choice)
        except Exception:
            continue
    try:
        return converter.structure(value, choices[-1])
    except Exception:
        if len(choices) == 1:
            raise
        raise TypeError(_mismatch(value, type_)) from None


def _table(converter: Converter, config: type) -> Callable[[Any, Any], Any]:
    fill: Callable[[Any, Any], Any] = make_dict_structure_fn(
        config, converter, _cattrs_forbid_extra_keys=True
    )

    def structure_table(value: Any, type_: Any) -> Any:
        if not isinstance(value, dict):
            has_use = isinstance(value, str) and "use" in attrs.fields_dict(config)
            raise TypeError(_mismatch(value, config) + (f': write {{ use = "{value}" }}' if has_use else ""))
        return fill(value, type_)

    return structure_table


def _problems(
    error: BaseException, key: str, elsewhere: Callable[[str], str], config: type | None = None
) -> Iterator[Problem]:
    """Walk cattrs' exception tree and yield one Problem for each leaf, with its dotted key."""
    if isinstance(error, ClassValidationError):
        noted, rest = error.group_exceptions()
        for inner, note in noted:
            yield from _problems(inner, join(key, note.name), elsewhere, error.cl)
        for inner in rest:
            yield from _problems(inner, key, elsewhere)
    elif isinstance(error, IterableValidationError):
        for inner, item in error.group_exceptions()[0]:
            yield from _problems(inner, join(key, item.index), elsewhere)
    elif isinstance(error, ForbiddenExtraKeysError):
        names = [field.name for field in attrs.fields(error.cl)]
        for name in sorted(error.extra_fields):
            valid = f"valid: {', '.join(names)}" if names else "this table has no keys"
            bases = (base for base in error.cl.__mro__ if isinstance(base, ExplainsKeys))
            told = next((base.NOT_KEYS[name] for base in bases if name in base.NOT_KEYS), "")
            hint = f": {told}" if told else elsewhere(name) or did_you_mean(name, names)
            yield Problem(join(key, name), f"unknown key '{name}'{hint}; {valid}")
    elif config is not None and isinstance(error, KeyError):
        name = key.rpartition(".")[2]
        yield Problem(key, f"missing; expected {expected(field_types(config)[name])}")
    else:
        yield Problem(key, str(error))


def _invalid(config: Any, key: str) -> Iterator[Problem]:
    """Run the validators of a config and of its nested configs."""
    for field in attrs.fields(type(config)):
        value, below = getattr(config, field.name), join(key, field.name)
        if field.validator is not None:
            try:
                field.validator(config, field, value)
            except Exception as error:
                said = error.args if isinstance(error, ValueError | TypeError) else ()
                yield Problem(below, str(said[0]) if said else f"its validator raised {describe(error)}")
        for name, part in _parts(value):
            yield from _invalid(part, join(below, name) if name else below)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configs that a field's value is or contains."""
    if attrs.has(type(value)):
        yield "", value
    elif isinstance(value, tuple | FrozenMapping):
        pairs = value.items() if isinstance(value, FrozenMapping) else enumerate(value)
        yield from ((str(name), part) for name, part in pairs if attrs.has(type(part)))
