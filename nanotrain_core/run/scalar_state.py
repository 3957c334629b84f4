"""Checks that a scalar, of which a checkpoint keeps one value, has the same value on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan

from nanotrain_core.contracts import Block


def scalars_of(blocks: Iterable[Block]) -> dict[str, float]:
    """Return the values of this rank's scalars by name."""
    return {block.name: float(block.tensor) for block in blocks if not block.global_shape}


def differing_scalar(ranks: Sequence[Mapping[str, float]]) -> str:
    """Return which scalar differs between ranks that have it, in words; empty if none does."""
    first: dict[str, tuple[int, float]] = {}
    for rank, scalars in enumerate(ranks):
        for name, value in scalars.items():
            other, known = first.setdefault(name, (rank, value))
            if value != known and not (isnan(value) and isnan(known)):
                state, _, parameter = name.partition("/")
                return (
                    f"state '{state}' of {parameter} is {known:.8g} on rank {other} and {value:.8g} on rank "
                    f"{rank}, and a checkpoint keeps one value of a scalar: expected the same on all ranks, "
                    "or a tensor shaped as the weight"
                )
    return ""
