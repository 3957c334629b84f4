"""The metrics of the core in a step, an evaluation and a checkpoint. Torch-free.

The reports that monitors receive and the rows of ``metrics.jsonl`` have the same fields: both are given as a
mapping of them. A field that is None, or missing, is no metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: By metric name, the field that has its value.
STEP = {
    name: name
    for name in (
        *("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "tokens_per_second", "seconds"),
        *("expert_load", "bubble", "phase"),
    )
}
EVALUATION = {
    "validation/loss": "loss",
    "validation/bits_per_byte": "bits_per_byte",
    "validation/seconds": "seconds",
}
CHECKPOINT = {"checkpoint/seconds": "seconds", "checkpoint/blocked": "blocked"}


def of_step(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a step, the terms of its loss among them."""
    terms = {f"losses/{term}": float(value) for term, value in fields["losses"].items()}
    return {**_values(STEP, fields), **terms}


def of_evaluation(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation, the further terms of its loss among them."""
    found = fields.get("losses", {})  # a row that others wrote may have none
    terms = {f"validation/losses/{term}": float(value) for term, value in found.items() if term != "lm"}
    return {**_values(EVALUATION, fields), **terms}


def of_checkpoint(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a checkpoint."""
    return _values(CHECKPOINT, fields)


def _values(table: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, float]:
    found = {name: fields.get(field) for name, field in table.items()}
    return {name: float(value) for name, value in found.items() if value is not None}
