"""Short hashes of the data that a run saw and of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.precision.quantized_storage import storage_of


def row_marks(tokens: Any) -> list[str]:
    """Return a mark of each sequence of a batch [B, S]."""
    return [hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()[:12] for row in tokens]


def weight_marks(placed: Iterable[PlacedParameter]) -> str:
    """Return a SHA-256 over all bits of this rank's weights."""
    total = hashlib.sha256()
    for each in placed:
        total.update(f"{each.placement.name}{each.placement.offset}".encode())
        total.update(storage_of(each.parameter).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
