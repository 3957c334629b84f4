"""What the user sees of an evaluation: a table, or JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nanotrain_core.api import PIPED_WIDTH
from nanotrain_sample.evaluate.measure import Measured


def tell(
    weights: str, model: str, measured: Sequence[Measured], tasks: Mapping[str, Any], *, json: bool
) -> None:
    """Print it on standard output.

    Args:
        weights: what was evaluated.
        model: the component's name.
        measured: of the validation split, or of each file.
        tasks: what ``lm_eval.simple_evaluate`` returned; empty for none.
        json: print one JSON object.
    """
    scores = list(_scores(tasks))
    if json:
        texts = [
            {
                "name": each.name,
                "tokens": each.tokens,
                "loss": each.loss,
                "perplexity": each.perplexity,
                "bits_per_byte": each.bits_per_byte,
            }
            for each in measured
        ]
        results = [dict(zip(("task", "metric", "filter", "value"), score, strict=True)) for score in scores]
        print(json_module.dumps({"weights": weights, "model": model, "texts": texts, "tasks": results}))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if measured:
        table = Table("text", "tokens", "loss", "perplexity", "bits per byte", title=weights)
        for each in measured:
            bits = "" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}"
            table.add_row(each.name, f"{each.tokens:,}", f"{each.loss:.4f}", f"{each.perplexity:.4g}", bits)
        console.print(table)
    if scores:
        table = Table("task", "metric", "filter", "value", title=weights)
        for name, metric, chosen, value in scores:
            table.add_row(name, metric, chosen, f"{value:.4f}")
        console.print(table)


def _scores(tasks: Mapping[str, Any]) -> Any:
    """Yield task, metric, filter and value; what stands beside them, as an alias, is no number."""
    for name, found in tasks.get("results", {}).items():
        for key, value in found.items():
            metric, _, chosen = key.partition(",")
            if chosen and isinstance(value, int | float) and not metric.endswith("_stderr"):
                yield name, metric, chosen, float(value)
