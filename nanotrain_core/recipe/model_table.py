"""What a recipe says of its model, as a checkpoint keeps it, and whether two such tables are of one model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

from nanotrain_core.errors import CheckpointError
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import TRAINING, Selection


def model_table(model: Selection) -> dict[str, Any]:
    """Return the table ``[model]`` with every key, defaults included."""
    return {"use": model.use, **attrs.asdict(model.config)}


def canonical_table(model: Selection) -> dict[str, Any]:
    """Return what the weights of a model compute, in the one form that all recipes of it share.

    That is what the config's method ``canonical()`` returns, where it has one: a value that is left unset
    stands there as what it means, and a key that nothing reads is missing. Else it is every key as it is.
    """
    own = getattr(model.config, "canonical", None)
    return {"use": model.use, **(own() if own else attrs.asdict(model.config))}


def training_keys(config: Any) -> frozenset[str]:
    """Return the fields of a model's config that say how it is trained, not what it computes."""
    return frozenset(field.name for field in attrs.fields(type(config)) if field.metadata.get(TRAINING))


def without_none(value: Any) -> Any:
    """Return a table without the keys that TOML cannot write: a saved table spells out every key."""
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
    """Compare the model of what was saved with that of a run: equal shapes can still be another function.

    Fields marked with ``TRAINING`` may differ.

    Args:
        saved: of :func:`model_table`, perhaps read from JSON.
        ours: of the run; None: it has none in its recipe.
        what: subject of the error's text.
        changing: fields that phases of the run change, which may differ too.

    Raises:
        CheckpointError: naming the first key that differs.
    """
    there, here = _plain(saved), _plain(canonical_table(ours) if ours else {})
    if ours is not None and there.get("use") == ours.use:
        rest = {key: value for key, value in without_none(there).items() if key != "use"}
        config, problems = structure(rest, type(ours.config), "model")
        if problems:
            text = f"{problems[0].key}: {problems[0].message}"
            raise CheckpointError(f"{what} of another model: its table does not fit this one: {text}")
        there = _plain(canonical_table(Selection("model", ours.use, config)))
    free = {*changing, *(training_keys(ours.config) if ours else ())}
    for difference in _differences(there, here, free):
        raise CheckpointError(f"{what} of another model: {difference}")


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table as it is read from JSON, which has no tuples."""
    return dict(json.loads(json.dumps(dict(table))))


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], free: Collection[str]) -> Iterator[str]:
    """Yield what differs: keys of both sides first, since they are why one side has more."""
    keys = sorted({*there, *here} - {*free}, key=lambda key: (key != "use", key))
    for key in keys:
        if key in there and key in here:
            yield from _difference(f"model.{key}", there[key], here[key])
    for key in keys:
        if (key in there) != (key in here):
            side, other = ("there", "in this recipe") if key in there else ("in this recipe", "there")
            yield f"model.{key} is {there.get(key, here.get(key))!r} {side} and has no meaning {other}"


def _difference(key: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict) and there.keys() == here.keys():
        for name in sorted(there):
            yield from _difference(f"{key}.{name}", there[name], here[name])
    elif there != here:
        yield f"{key} is {there!r} there and {here!r} in this recipe"
