"""Rows of ``metrics.jsonl``: which can be read, and what they hold. Torch-free.

Somebody may have edited the file, or a disk damaged it: a row is read as a whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from nanotrain_core.metrics.of_reports import of_checkpoint, of_evaluation, of_step
from nanotrain_core.metrics.report import Histogram

#: Fields that the rows of an event must have.
_NEEDED = {
    "start": ("first_step", "time"),
    "step": ("step", "time"),
    "evaluation": ("step", "loss"),
    "checkpoint": ("step", "time", "seconds", "blocked", "path"),
    "save_failed": ("step", "time", "problem"),
    "rollback": ("step", "restored", "time", "reason"),
    "end": ("time", "reason"),
}
#: For the event of each row with metrics of the core, what returns them.
_METRICS = {"step": of_step, "evaluation": of_evaluation, "checkpoint": of_checkpoint}
#: Fields that a row may have: whole numbers.
_COUNTS = ("step", "attempt", "first_step", "restored", "steps", "world_size", "parameters")
_TEXTS = ("path", "problem", "reason")
#: The last step that a curve can have.
_MOST = 2**63 - 1
#: 31 December 9999, in seconds since 1970: later times have no date.
_LAST_TIME = 253_402_214_400


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line, None if it is invalid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # incomplete, not UTF-8, or lists in lists without an end
        return None
    return row if isinstance(row, dict) and "event" in row else None


def check_row(row: Mapping[str, Any]) -> None:
    """Check the fields of a row other than its metrics.

    Raises:
        ValueError: one is missing, or has a value of another kind.
    """
    needed = _NEEDED.get(row["event"], ()) if isinstance(row["event"], str) else ()
    for name in needed:
        if row.get(name) is None:
            raise ValueError(f"{name} is missing")
    for name in _COUNTS:
        if row.get(name) is not None and not (type(row[name]) is int and 0 <= row[name] <= _MOST):
            raise ValueError(f"{name} is {row[name]!r}, no count")
    for name in set(needed) & {"time", "seconds", "blocked"}:
        if not 0 <= float(row[name]) <= _LAST_TIME or isinstance(row[name], str):
            raise ValueError(f"{name} is {row[name]!r}, no seconds")
    for name in set(needed) & {*_TEXTS}:
        if not isinstance(row[name], str):
            raise ValueError(f"{name} is {row[name]!r}, no text")


def metrics_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the numbers of a row by their metric names."""
    if row["event"] == "metrics":
        values: Mapping[str, Any] = row.get("values", {})
        return values
    of_event = _METRICS.get(row["event"])
    return of_event(row) if of_event else {}


def histogram_of(said: Mapping[str, Any]) -> Histogram:
    """Return a histogram of a row.

    Raises:
        ValueError: its edges do not ascend, or there is not one count for each bin.
    """
    edges, counts = tuple(map(float, said["edges"])), tuple(map(float, said["counts"]))
    ascend = all(low < high for low, high in pairwise(edges))
    if not counts or len(edges) != len(counts) + 1 or not ascend:
        raise ValueError(f"{len(counts)} counts between {len(edges)} edges that ascend")
    if not all(0 <= count < math.inf for count in counts):
        raise ValueError("a count is no finite number from 0")
    return Histogram(edges, counts, *(float(said[name]) for name in ("below", "above", "nan")))
