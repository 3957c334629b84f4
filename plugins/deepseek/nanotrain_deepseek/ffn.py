"""The feed-forward layer of dense blocks, and of all shared experts together.

Shapes: B batch, S sequence, D width, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.linear import Linear
from nanotrain_core.models.swiglu import swiglu


class SwiGLU(nn.Module):
    """Feed-forward layer with a gate. Source: Shazeer, arXiv 2002.05202, equation 6."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = tag(Linear(width, inner, bias=False), Role.COLUMN)
        self.up = tag(Linear(width, inner, bias=False), Role.COLUMN)
        self.down = tag(Linear(inner, width, bias=False), Role.ROW)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y_BSD: torch.Tensor = self.down(swiglu(self.gate(x_BSD), self.up(x_BSD), self.down))
        return y_BSD
