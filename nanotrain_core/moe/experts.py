"""All experts of a layer, stacked: a grouped GEMM for the rows of each expert.

Shapes: B batch, S sequence, N rows sorted by expert, E experts on this rank, D width, F width of one expert
on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.moe.routing import Routing, run_locally


class Experts(nn.Module):
    """SwiGLU experts of a layer, stacked. Wrappers call ``compute`` with rows that they have permuted."""

    def __init__(self, experts: int, width: int, inner: int, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.experts, self.ops = experts, ops
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        split = {"gate": 1, "up": 1, "down": 2}
        tag(self, Role.EXPERTS, split=split, gemm_weights=tuple(split))

    def forward(self, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return each token's weighted sum of its experts [B, S, D], with all experts on this rank."""
        return run_locally(self.compute, x_BSD, routing, self.experts, self.ops)

    def compute(self, rows_ND: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [N, D] for rows sorted by expert, ``counts_E`` of them for each."""
        return self.ops.experts(rows_ND, counts_E, self.gate, self.up, self.down)


class CallOnce:
    """Calls a module once, at the first call: while rows are in flight to experts, or afterwards.

    For ``Routing.meanwhile``.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self.module, self.x = module, x
        self.y: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """Return its output."""
        if self.y is None:
            self.y = self.module(self.x)
        return self.y
