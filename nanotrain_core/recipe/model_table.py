"""What a recipe says of its model, as a checkpoint keeps it, and whether two such tables are of one model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from nanotrain_core.errors import CheckpointError
from nanotrain_core.recipe.tree import TRAINING, Selection


def model_table(model: Selection) -> dict[str, Any]:
    """Return the table ``[model]`` with every key, defaults included."""
    return {"use": model.use, **attrs.asdict(model.config)}


def training_keys(config: Any) -> frozenset[str]:
    """Return the fields of a model's config that say how it is trained, not what it computes."""
    return frozenset(field.name for field in attrs.fields(type(config)) if field.metadata.get(TRAINING))


def refuse_other_model(
    saved: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    what: str = "the checkpoint is",
) -> None:
    """Compare the model tables of what was saved and of a run: equal shapes can still be another function.

    Args:
        saved: of :func:`model_table`, perhaps read from JSON.
        ours: of the run.
        free: keys that may differ.
        what: subject of the error's text.

    Raises:
        CheckpointError: naming the first key that differs.
    """
    there, here = (json.loads(json.dumps(dict(table))) for table in (saved, ours))
    for key in sorted({*there, *here} - {*free}, key=lambda key: (key != "use", key)):
        if there.get(key) != here.get(key):
            raise CheckpointError(
                f"{what} of another model: model.{key} is {there.get(key)!r} there and "
                f"{here.get(key)!r} in this recipe"
            )
