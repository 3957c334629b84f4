"""Checks of the recipe's model before ranks start. Imports torch only for a config that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nanotrain_core.api import Layout, Problem, Recipe
from nanotrain_fp8_deepseek_v3 import read_modules
from nanotrain_fp8_deepseek_v3.configs import ModuleFormats


def check_model(
    recipe: Recipe, config: ModuleFormats, layout: Layout, model: Callable[[], Any]
) -> Iterator[Problem]:
    """Reject patterns that match modules, but no linear layer."""
    if any(pattern != "*" for _, pattern in read_modules(config)):
        from nanotrain_fp8_deepseek_v3.policy import unmatched_in

        yield from unmatched_in(model(), config)
