"""The table of a run's weights: their format, what is kept beside them, and in how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from nanotrain_core.api import NanotrainError, did_you_mean, lies_in
from nanotrain_core.api.torch import Mesh


@attrs.define(frozen=True)
class Row:
    """One row of the table: parameters with the same role, format and master."""

    role: str
    """Of their modules, or what they have in common instead: ``pattern`` if a pattern of ``fp4_master`` keeps
    them, ``none`` without a role, ``all else`` where ``qlora`` does not pack them."""
    weights: str
    """What the model computes with, and what is kept beside it."""
    parameters: int
    bytes_each: float
    """Of the weight and what is beside it, without the optimizer's moments."""


def summed(rows: Iterable[Row]) -> list[Row]:
    """Return ``rows``, merging those that differ only in their number of parameters."""
    counts: Counter[tuple[str, str, float]] = Counter()
    for row in rows:
        counts[row.role, row.weights, row.bytes_each] += row.parameters
    return [Row(role, weights, count, each) for (role, weights, each), count in sorted(counts.items())]


def lines(rows: Sequence[Row], in_bf16: float = 6) -> list[str]:
    """Return lines with the bytes per parameter of weights and masters, by role and in total.

    Args:
        rows: of the table.
        in_bf16: bytes per parameter of the same run under ``bf16``, in the mean: 6 if all are trained.
    """
    total = sum(row.parameters for row in rows)
    held = sum(row.parameters * row.bytes_each for row in rows)
    return [
        "weights and masters, without moments (a rank's part of each stage, before zero12 or fsdp2 cut it):",
        *(
            f"  {row.role:<12} {row.weights:<26} {row.parameters:>15,} x {row.bytes_each:g} bytes"
            for row in rows
        ),
        f"  {'all':<39} {total:>15,} x {held / max(1, total):.4g} bytes; "
        f"bf16 with float32 masters: {in_bf16:.4g}",
    ]


def of_all_stages(names: Sequence[str], rows: Sequence[Row], keep: Iterable[str], mesh: Mesh) -> list[Row]:
    """Return the rows of the whole pipeline. Gathers over pp.

    Args:
        names: of this rank's parameters.
        rows: of this rank.
        keep: the patterns of ``precision.keep``.
        mesh: of the run.

    Raises:
        NanotrainError: a pattern matches no parameter of any stage; the text has the nearest name.
    """
    own = (names, rows)
    stages = mesh.gather(own, "pp") if "pp" in mesh.layout.dims else [own]
    everyones = sorted({name for found, _ in stages for name in found})
    for pattern in keep:
        if not any(lies_in(name, pattern) for name in everyones):
            near = did_you_mean(pattern, everyones)
            raise NanotrainError(f"precision.keep: '{pattern}' matches no parameter of the model{near}")
    return summed(row for _, found in stages for row in found)
