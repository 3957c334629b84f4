"""The gated feed-forward layer that both models use.

Shapes: B batch, S sequence, D width, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.ops import TORCH_OPS, Ops


class SwiGLU(nn.Module):
    """Feed-forward layer with a gate. Source: Shazeer, arXiv 2002.05202, equation 6."""

    def __init__(self, width: int, inner: int, ops: Ops = TORCH_OPS, *, bias: bool = False) -> None:
        super().__init__()
        self.ops = ops
        self.gate = tag(nn.Linear(width, inner, bias=bias), Role.COLUMN)
        self.up = tag(nn.Linear(width, inner, bias=bias), Role.COLUMN)
        self.down = tag(nn.Linear(inner, width, bias=bias), Role.ROW)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y_BSD: torch.Tensor = self.down(self.ops.swiglu(self.gate(x_BSD), self.up(x_BSD)))
        return y_BSD
