"""The explanation of a recipe, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanotrain_core.api import Layout, NanotrainError, Recipe, Registry
from nanotrain_plan.explain.state import matrices, ranks, stages, state
from nanotrain_plan.explain.step import batch, communication, computed, saved, schedule
from nanotrain_plan.explain.subject import Subject
from nanotrain_plan.rendering.parts import Section, to_json

#: Of what ``--json`` prints: see :data:`nanotrain_plan.plan.VERSION`.
VERSION = "1.0"


def explain(recipe: Recipe, registry: Registry, layout: Layout, *, host: bool) -> list[Section]:
    """Take a dry step of a checked recipe and tell it.

    Args:
        recipe: checked.
        registry: the plugins.
        layout: of the recipe.
        host: whether ranks are CPUs, which exchange tensors through gloo.

    Raises:
        NanotrainError: a component does something that cannot be followed without numbers.
    """
    try:
        subject = Subject.of(recipe, registry, layout, host=host)
    except (NotImplementedError, RuntimeError) as problem:
        raise NanotrainError(
            f"this recipe cannot be explained: {str(problem).partition(chr(10))[0]}"
        ) from problem
    told = {
        "The ranks": ranks,
        "The layers": stages,
        "Who holds which part of which matrix": matrices,
        "The batch": batch,
        "The order of passes": schedule,
        "Communication": communication,
        "What is computed, in which precision": computed,
        "What is kept of each parameter": state,
        "What a checkpoint holds": saved,
    }
    return [Section(title, list(body(subject))) for title, body in told.items()]


def as_json(recipe: Recipe, layout: Layout, sections: Sequence[Section]) -> dict[str, Any]:
    """Return what ``--json`` prints; docs/explain.md lists the keys."""
    return {
        "version": VERSION,
        "recipe": recipe.run.name,
        "ranks": layout.world_size,
        "layout": layout.sizes,
        "sections": to_json(sections),
    }
