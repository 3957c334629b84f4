"""Two 4-bit codes to a byte: the first of each pair in the low half."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 15, an even number of uint8, as half as many bytes, flat."""
    pairs = codes.reshape(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=1).flatten()
