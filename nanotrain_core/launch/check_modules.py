"""Checks the modules that monitors refer to by name against those of the recipe's model.

The model is built without storage. Imports torch only if a monitor of the recipe names modules.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from nanotrain_core.errors import Problem, did_you_mean
from nanotrain_core.recipe.component_functions import patterns_of_monitors
from nanotrain_core.recipe.load import Resolution, refuse


def check_modules(found: Resolution) -> None:
    """Reject names and patterns that match no module or parameter of the model.

    Raises:
        RecipeError: with one line for each, and the nearest name.
        PluginError: a component's ``reads_modules`` is wrong.
    """
    asked = list(patterns_of_monitors(found.recipe, found.registry, "reads_modules"))
    if any(pattern != "*" for _, pattern in asked):
        from nanotrain_core.hf.open_weights import shapes_of

        names = [*shapes_of(found.recipe.model, found.registry)]
        refuse(found.merged, _unknown(asked, names))


def _unknown(asked: list[tuple[str, str]], parameters: list[str]) -> list[Problem]:
    split = [name.split(".") for name in parameters]
    known = [*dict.fromkeys(".".join(words[:n]) for words in split for n in range(1, len(words) + 1))]
    return [
        Problem(key, f"the model has no module '{pattern}'{did_you_mean(pattern, known)}")
        for key, pattern in asked
        if not any(fnmatchcase(name, pattern) for name in known)
    ]
