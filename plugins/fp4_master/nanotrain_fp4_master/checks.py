"""A check of the recipe's model before ranks start. Imports torch only for a config that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nanotrain_core.api import Layout, Problem, Recipe
from nanotrain_fp4_master import FP4MasterConfig


def check_model(
    recipe: Recipe, config: FP4MasterConfig, layout: Layout, model: Callable[[], Any]
) -> Iterator[Problem]:
    """Reject matrices of which a rank's part would cut a block; ranges of ZeRO never do."""
    if config.form != "bf16" and layout.degree("tp") * layout.degree("ep") * layout.degree("etp") > 1:
        from nanotrain_fp4_master.cut_matrices import cut_in

        texts = list(cut_in(model(), config, layout))
        if texts:
            more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
            yield Problem("precision.block_size", f"{texts[0]}{more}")
