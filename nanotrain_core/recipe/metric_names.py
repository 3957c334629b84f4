"""Checks the metrics that monitors refer to by name against those that the recipe publishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanotrain_core.errors import Problem, did_you_mean
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import may_name
from nanotrain_core.recipe.component_functions import patterns_in_configs
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import Registry


def unknown_metrics(recipe: Recipe, registry: Registry) -> Iterator[Problem]:
    """Yield a problem for each name that neither the core nor a monitor of the recipe publishes."""
    used = {selection.use for selection in recipe.monitor}
    of_recipe = [metric.name for use in sorted(used) for metric in registry.get("monitor", use).metrics]
    declared = [*(metric.name for metric in CORE), *of_recipe]
    for key, pattern in patterns_in_configs(recipe, registry, "reads_metrics"):
        if not any(may_name(pattern, name) for name in declared):
            text = f"nothing in this recipe publishes the metric '{pattern}'"
            yield Problem(key, text + _advice(pattern, declared, used, registry))


def _advice(pattern: str, declared: Sequence[str], used: set[str], registry: Registry) -> str:
    """Return the monitor that would publish it, or the nearest existing name."""
    for use in registry.names("monitor"):
        names = [metric.name for metric in registry.get("monitor", use).metrics] if use not in used else []
        if any(may_name(pattern, name) for name in names):
            return f'; add [[monitor]] use = "{use}", which does'
    return did_you_mean(pattern, declared) or "; `nanotrain metrics` lists what there is"
