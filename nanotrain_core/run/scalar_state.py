"""Checks that state of which a checkpoint keeps one copy is the same on all ranks: scalars, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import isnan
from typing import Any

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


#: Parts of the saved JSON that ranks compare. Monitors measure, and some of them act on rank 0 alone.
COMPARED = ("optimizer", "loss_scale", "data")


def digests_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each part of the saved JSON that ranks must agree on."""
    texts = {part: json.dumps(meta[part], sort_keys=True, default=repr) for part in COMPARED}
    return {part: sha256(text.encode()).hexdigest() for part, text in texts.items()}


def differing_part(ranks: Sequence[Mapping[str, str]]) -> str:
    """Return the first part of the saved JSON that differs from rank 0's, and on which rank, in words."""
    found = (
        f"'{part}' on rank {rank}"
        for part in ranks[0]
        for rank, digests in enumerate(ranks)
        if digests.get(part) != ranks[0][part]
    )
    return next(found, "")
