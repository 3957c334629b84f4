"""The random Hadamard transform of blocks of sixteen: spreads an outlier over its block.

``x' = H D x / 4`` with H Sylvester's Hadamard matrix of 16 points and D a diagonal of signs, which is
orthogonal: transforming both operands of a product along what it sums over leaves the product unchanged. Both
need the same signs, so one vector serves all layers, ranks and steps.

Additions are in float32, in the order of the fast transform, which no compiler changes: every device and a
compiled run have the same bits.

Source: NVIDIA, arXiv 2509.25149, section 4.2 (16 points, one sign vector, operands of wgrad alone).
"""

from __future__ import annotations

import torch

from nanotrain_fp8_deepseek_v3.nvfp4.constants import constant

#: The signs of D: the bits of the golden ratio's fraction, 0.1001111000110111, of which 1 is a minus.
SIGNS = tuple(-1 if bit == "1" else 1 for bit in f"{0x9E37:016b}")


def transform(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return float32 blocks transformed along ``dim``, negative, which has 16 elements."""
    shape = [1] * x.dim()
    shape[dim] = len(SIGNS)
    signs: torch.Tensor = constant(SIGNS, x.device)
    y = x * signs.view(shape)
    for half in (1, 2, 4, 8):
        pairs = y.unflatten(dim, (8 // half, 2, half))  # type: ignore[no-untyped-call]
        first, second = pairs.unbind(dim - 1)
        y = torch.stack([first + second, first - second], dim - 1).flatten(dim - 2, dim)
    return y * 0.25
