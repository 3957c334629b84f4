"""Checks of the recipe's model before ranks start. Imports torch only for a config that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nanotrain_core.api import Layout, Problem, Recipe
from nanotrain_lora import LoRAConfig


def check_model(
    recipe: Recipe, config: LoRAConfig, layout: Layout, model: Callable[[], Any]
) -> Iterator[Problem]:
    """Reject targets that name no linear layer, and a place before a wrapper that splits those it names."""
    place = next(number for number, each in enumerate(recipe.parallel) if each.config is config)
    later = {
        each.use: f"tp = {layout.size('tp')}"
        for each in recipe.parallel[place + 1 :]
        if "tp" in each.mesh_dims and layout.degree("tp") > 1
    }
    if config.targets or later:
        from nanotrain_lora.adapters import problems

        yield from problems(model(), config, f"parallel.{place}", later)
