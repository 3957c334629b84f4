"""RMSNorm as a module. Shapes: D width."""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.models.ops import TORCH_OPS, Ops


class RMSNorm(nn.Module):
    """Divide by the root mean square of the width, in float32 at least, then scale each element."""

    def __init__(self, width: int, *, eps: float, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)
