"""Converts values and state to JSON, and reports where they cannot be represented."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain_core.errors import PluginError


def as_json(value: Any, path: str = "meta") -> Any:
    """Return a copy of ``value`` as a JSON round trip yields it: tuples become lists.

    Raises:
        TypeError: it cannot be represented; the text says where, as in ``optimizer.moments.2``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(each, f"{path}.{number}") for number, each in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(each, f"{path}.{key}") for key, each in value.items()}
    odd = f"a {type(value).__name__}" + (" whose keys are not all str" if isinstance(value, Mapping) else "")
    raise TypeError(f"{path} is {odd}, which JSON cannot represent")


def remembered(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a value for a checkpoint.

    Raises:
        PluginError: it cannot be represented as JSON.
    """
    try:
        return {key: as_json(value, key) for key, value in meta.items()}
    except (AttributeError, TypeError) as problem:
        raise PluginError(f"a checkpoint cannot store this state: {problem}") from None


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON. Non-finite numbers become the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which JSON numbers cannot represent; paths become strings.

    >>> json_text({"loss": float("nan"), "step": 3})
    '{"loss": "NaN", "step": 3}'
    """
    try:
        return json.dumps(value, default=_path, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), default=_path, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
