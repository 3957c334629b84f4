"""Opens the weights that a run starts from, before its ranks do: imports torch only for a run with some."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.errors import CheckpointError, Problem
from nanotrain_core.hf.mapping import HFError
from nanotrain_core.launch.check_modules import adding
from nanotrain_core.recipe.load import Resolution, refuse


def check_weights(found: Resolution) -> None:
    """Reject ``run.weights`` that cannot be read, or are of another model. No tensor is read for damage.

    Raises:
        RecipeError: naming the key.
    """
    recipe, registry = found.recipe, found.registry
    if not recipe.run.weights:
        return
    from nanotrain_core.hf.load_weights import open_weights_of
    from nanotrain_core.run.added_parameters import shapes_added_by

    shapes = shapes_added_by(recipe.model, adding(found), registry)
    added = {name: shape for some in shapes for name, shape in some.items()}
    wrappers = [each.config for each in recipe.parallel]
    try:
        open_weights_of(recipe.model, Path(recipe.run.weights), registry, added, wrappers)
    except (CheckpointError, HFError) as problem:
        refuse(found.merged, [Problem("run.weights", str(problem))])
