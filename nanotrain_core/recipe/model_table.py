"""The model's table of a recipe, as checkpoints store it, and whether two tables are of the same model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

from nanotrain_core.errors import CheckpointError
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import TRAINING_ONLY, Selection
from nanotrain_core.run.plain_json import as_json


def model_table(model: Selection) -> dict[str, Any]:
    """Return the table ``[model]`` with every key, defaults included."""
    return {"use": model.use, **attrs.asdict(model.config)}


def canonical_table(model: Selection) -> dict[str, Any]:
    """Return the keys that define what a model computes, in the canonical form shared by all its recipes.

    See :meth:`~nanotrain_core.recipe.model_config.ModelConfig.canonical`.
    """
    return {"use": model.use, **model.config.canonical()}


def training_keys(config: Any) -> frozenset[str]:
    """Return the fields of a model's config that affect how it is trained, not what it computes."""
    return frozenset(field.name for field in attrs.fields(type(config)) if field.metadata.get(TRAINING_ONLY))


def without_none(value: Any) -> Any:
    """Return a table without keys that TOML cannot represent: a saved table has every key."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value


def refuse_other_model(
    saved: Mapping[str, Any],
    ours: Selection | None,
    *,
    what: str = "the checkpoint is",
    changing: Collection[str] = (),
) -> None:
    """Reject the state of another model: even with equal shapes it may compute another function.

    Fields marked with ``TRAINING_ONLY`` may differ.

    Args:
        saved: result of :func:`model_table`, perhaps read from JSON.
        ours: that of the run; None: its recipe has no model.
        what: subject of the error message.
        changing: fields that phases of the run change, which may differ too.

    Raises:
        CheckpointError: naming the keys that differ.
    """
    there, here = as_json(saved, "model"), as_json(canonical_table(ours) if ours else {}, "model")
    if ours is not None and there.get("use") == ours.use:
        rest = {key: value for key, value in without_none(there).items() if key != "use"}
        config, problems = structure(rest, type(ours.config), "model")
        if problems:
            text = f"{problems[0].key}: {problems[0].message}"
            raise CheckpointError(f"{what} of another model: its table does not fit this one: {text}")
        there = as_json(canonical_table(Selection("model", ours.use, config)), "model")
    free = {*changing, *(training_keys(ours.config) if ours else ())}
    if found := differences("model", there, here, free):
        raise CheckpointError(f"{what} of another model: {'; '.join(found)}")


def differences(
    section: str, there: Mapping[str, Any], here: Mapping[str, Any], free: Collection[str]
) -> list[str]:
    """Return how two tables of a section differ, except in ``free`` keys, in the order of this recipe's keys.

    Keys of one side alone follow from those that both have, and are named if these are equal. If the tables
    are of different components, that alone is named.
    """
    keys = [key for key in {"use": None, **here, **there} if key not in free]
    both = [key for key in keys if key in there and key in here]
    found = [text for key in both for text in _difference(f"{section}.{key}", there[key], here[key])]
    for key in keys if not found else ():
        if (key in there) != (key in here):
            side, other = ("there", "in this recipe") if key in there else ("in this recipe", "there")
            value = there.get(key, here.get(key))
            found.append(f"{section}.{key} is {value!r} {side} and has no meaning {other}")
    return found if there.get("use") == here.get("use") else found[:1]


def _difference(key: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict) and there.keys() == here.keys():
        for name in sorted(there):
            yield from _difference(f"{key}.{name}", there[name], here[name])
    elif there != here:
        yield f"{key} is {there!r} there and {here!r} in this recipe"
