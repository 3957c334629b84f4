"""The bytes of a tensor, whatever its dtype and strides."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, uint8 [N]; a view if it is contiguous."""
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # strides of one number may be any
