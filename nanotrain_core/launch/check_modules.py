"""Checks what components name or need of the recipe's model against its modules.

The model is built without storage. Imports torch only if a component of the recipe reads its modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from nanotrain_core.errors import Problem, did_you_mean
from nanotrain_core.hf.mapping import HFMapping
from nanotrain_core.recipe.component_functions import call_declared, patterns_in_configs
from nanotrain_core.recipe.load import Resolution, refuse
from nanotrain_core.recipe.tree import Selection

if TYPE_CHECKING:
    from torch import nn


def check_modules(found: Resolution) -> None:
    """Reject names and patterns that match no module or parameter, and what components' ``check_model`` find.

    Raises:
        RecipeError: with one line for each, and the nearest name.
        PluginError: a component's ``reads_modules`` or ``check_model`` is wrong.
    """
    recipe, registry = found.recipe, found.registry

    def model() -> nn.Module:
        from nanotrain_core.run.added_parameters import model_with

        return model_with(recipe.model, adding(found), registry)

    asked = list(patterns_in_configs(recipe, registry, "reads_modules"))
    if any(pattern != "*" for _, pattern in asked):
        refuse(found.merged, _unknown(asked, (name for name, _ in model().named_parameters()), found))
    checked = (recipe, found.layout, registry, Problem, {"model": model})
    problems = [p for each in recipe.selections() for p in call_declared("check_model", each, *checked)]
    refuse(found.merged, problems)


def adding(found: Resolution) -> list[Selection]:
    """Return the wrappers of a recipe that add parameters to its model."""
    return [each for each in found.recipe.parallel if found.registry.get("parallel", each.use).added]


def _unknown(asked: list[tuple[str, str]], parameters: Iterable[str], resolved: Resolution) -> list[Problem]:
    split = [name.split(".") for name in parameters]
    known = [*dict.fromkeys(".".join(words[:n]) for words in split for n in range(1, len(words) + 1))]
    return [
        Problem(
            key,
            f"the model has no module or parameter '{pattern}'"
            f"{_theirs(pattern, resolved) or _nearest(pattern, known)}",
        )
        for key, pattern in asked
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def _theirs(pattern: str, found: Resolution) -> str:
    """Return what modules are called here that have such a name in Hugging Face's models."""
    model = found.recipe.model
    hf: HFMapping | None = found.registry.get("model", model.use).load_optional("hf")
    names = {
        (tensor.name.removesuffix(".weight"), mapping.name.removesuffix(".weight"))
        for mapping in (hf.mappings(model.config) if hf else ())
        for tensor in (mapping.hf if isinstance(mapping.hf, tuple) else (mapping.hf,))
    }
    last = sorted({name.rpartition(".")[2] for theirs, name in names if fnmatchcase(theirs, f"*{pattern}")})
    word = pattern.rpartition(".")[2]
    return f": what transformers calls {word} is {', '.join(last)} here" if {*last} - {word} else ""


def _nearest(pattern: str, known: list[str]) -> str:
    """Return the nearest name; of a pattern of any module's last name, all last names if none is near."""
    last = pattern.removeprefix("*.")
    if last == pattern or "." in last:
        return did_you_mean(pattern, known)
    within = (name.rpartition(".")[2] for name in known if "." in name)
    names = [*dict.fromkeys(name for name in within if not name.isdecimal())]
    return did_you_mean(f"*.{last}", [f"*.{name}" for name in names], cutoff=0.75) or (
        f"; modules have the names {', '.join(names)}"
    )
