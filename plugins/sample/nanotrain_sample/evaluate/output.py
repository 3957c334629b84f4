"""What the user sees of an evaluation: a table, or JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
                "losses": dict(each.losses),
            }
            for each in measured
        ]
        results = [dict(zip(("task", "metric", "filter", "value"), score, strict=True)) for score in scores]
        print(json_module.dumps({"weights": weights, "model": model, "texts": texts, "tasks": results}))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if measured:
        rows = [
            (
                each.name,
                f"{each.tokens:,}",
                f"{each.loss:.4f}",
                "" if each.perplexity is None else f"{each.perplexity:.4g}",
                "" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}",
            )
            for each in measured
        ]
        _print(console, weights, ("text", "tokens", "loss", "perplexity", "bits per byte"), rows)
    losses = {name: value for each in measured for name, value in each.losses.items() if name != "lm"}
    if losses:
        terms = [(name, f"{value:.4f}") for name, value in losses.items()]
        _print(console, weights, ("other term of the loss", "mean"), terms)
    if scores:
        columns = ("task", "metric", "filter", "value")
        _print(console, weights, columns, [(*score[:3], f"{score[3]:.4f}") for score in scores])


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, or a line for each cell where the terminal is too narrow: a table would cut numbers."""
    table = Table(*columns, title=Text(title, "table.title"))
    for row in rows:
        table.add_row(*map(Text, row))
    if console.measure(table, options=console.options.update(width=PIPED_WIDTH)).maximum <= console.width:
        console.print(table)
        return
    console.print(Text(title), soft_wrap=True)  # the terminal's own wrapping, from which names can be copied
    for row in rows:
        console.print(Text(row[0]), soft_wrap=True)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                console.print(Text(f"  {name}: {cell}"), soft_wrap=True)


def _scores(tasks: Mapping[str, Any]) -> Any:
    """Yield task, metric, filter and value; what stands beside them, as an alias, is no number."""
    for name, found in tasks.get("results", {}).items():
        for key, value in found.items():
            metric, _, chosen = key.partition(",")
            if chosen and isinstance(value, int | float) and not metric.endswith("_stderr"):
                yield name, metric, chosen, float(value)
