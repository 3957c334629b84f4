"""State as JSON gives it back, and where it is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotrain_core.errors import PluginError


def as_json(value: Any, path: str = "meta") -> Any:
    """Return a copy of ``value`` as JSON gives it back: tuples become lists.

    Raises:
        TypeError: it is no JSON; where, as ``optimizer.moments.2``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(each, f"{path}.{number}") for number, each in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(each, f"{path}.{key}") for key, each in value.items()}
    odd = f"a {type(value).__name__}" + (" whose keys are not all str" if isinstance(value, Mapping) else "")
    raise TypeError(f"{path} is {odd}, which JSON does not know")


def remembered(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a checkpoint is to remember.

    Raises:
        PluginError: it is no JSON.
    """
    try:
        return {key: as_json(value, key) for key, value in meta.items()}
    except (AttributeError, TypeError) as problem:
        raise PluginError(f"a checkpoint cannot remember this state: {problem}") from None
