"""A run's settings as plain values, for sinks that show them with the metrics. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import tomli

from nanotrain_core.recipe.secrets import HIDDEN, is_secret
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.recipe.write import write_resolved


def run_settings(recipe: Any) -> dict[str, Any]:
    """Return a resolved recipe, or the config of a script, as nested tables of plain values.

    It may be published: values of keys such as ``webhook`` and ``token`` are omitted.
    """
    if isinstance(recipe, Recipe):
        return _shown(tomli.loads(write_resolved(recipe)))  # type: ignore[no-any-return]
    table = attrs.asdict(recipe) if attrs.has(type(recipe)) else {"config": recipe}
    return _shown(_plain(table))  # type: ignore[no-any-return]


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: HIDDEN if each and is_secret(key) else _shown(each) for key, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list) else value


def flat_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return settings by dotted key, as ``--set`` takes them; items of a list of tables by index.

    >>> flat_settings({"run": {"steps": 3}, "monitor": [{"use": "jsonl"}], "names": [1, 2]})
    {'run.steps': 3, 'monitor.0.use': 'jsonl', 'names': '[1, 2]'}
    """
    found: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(number): each for number, each in enumerate(value)}  # noqa: PLW2901
        if isinstance(value, Mapping):
            found.update({f"{key}.{rest}": each for rest, each in flat_settings(value).items()})
        else:
            found[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` as TOML or JSON can represent it, other values as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
