"""All experts of a layer, stacked: a matrix product for the rows of each expert.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.moe.grouped_mm import Products, choose_products
from nanotrain_core.moe.routing import Routing, run_locally
from nanotrain_core.pipeline.weight_gradients import is_postponing, sum_of, weight_gradient
from nanotrain_core.precision.gemm import products_of
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.given_products import given_swiglu


class Experts(nn.Module):
    """SwiGLU experts. ``compute`` is what wrappers call with rows of their own making."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        E, F_, D = config.experts, config.expert_ffn, config.width
        self.experts = E
        self.gate = nn.Parameter(torch.empty(E, F_, D))
        self.up = nn.Parameter(torch.empty(E, F_, D))
        self.down = nn.Parameter(torch.empty(E, D, F_))
        split = {"gate": 1, "up": 1, "down": 2}
        tag(self, Role.EXPERTS, split=split, products=tuple(split))

    def forward(self, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return each token's weighted sum of its experts [B, S, D], all of which are on this rank."""
        return run_locally(self.compute, x_BSD, routing, self.experts)

    def compute(self, rows_ND: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [N, D] for rows sorted by expert, ``counts_E`` of them each.

        An expert may have no rows, and there may be none at all. Of experts split along F, a partial sum.
        """
        given = products_of(self)
        if given:
            y_ND: torch.Tensor = given_swiglu(rows_ND, counts_E, self, given)
            return y_ND
        products = choose_products(rows_ND, counts_E, self.gate)
        y_ND = _SwiGLU.apply(rows_ND, self.gate, self.up, self.down, products)  # type: ignore[no-untyped-call]
        return y_ND


class _WeightGradient:
    """The gradient of stacked weights: a piece at a time, while its rows are in the cache, or all put off.

    Where it may, it is added to the gradients of microbatches before.
    """

    def __init__(self, weight_EBA: torch.Tensor, products: Products, *, wanted: bool) -> None:
        self.weight, self.products, self.wanted = weight_EBA, products, wanted
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.total = sum_of(weight_EBA) if wanted else None
        self.memory: torch.Tensor | None = None
        self.pieces: list[Any] = []
        self.made = 0

    def add(self, d_y: torch.Tensor, x: torch.Tensor) -> None:
        """Take the rows of one more piece."""
        if self.wanted:
            self.rows.append((d_y, x))
            if not is_postponing(self.weight):
                self.make()

    def make(self) -> torch.Tensor:
        """Make the pieces whose rows wait, and return the gradient, or the sum that it was added to."""
        if not self.pieces:
            self.memory, self.pieces = self.products.weight_room(self.weight, self.total)
        add = self.memory is not None and self.memory is self.total
        for rows in self.rows:
            self.pieces[self.made] = self.products.of_weight(*rows, self.pieces[self.made], add=add)
            self.made += 1
        self.rows.clear()
        gradient: torch.Tensor = self.pieces[0] if self.memory is None else self.memory
        return gradient

    def result(self) -> torch.Tensor | None:
        """Return the gradient; None: it is not wanted, was put off, or is where autograd would add it."""
        gradient = weight_gradient(self.weight, self.make) if self.wanted else None
        return None if gradient is self.total else gradient


class _SwiGLU(torch.autograd.Function):
    """Forward: y = down(h), h = silu(gate(x)) up(x). Backward makes h again: it is cheap and large."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        gate_EFD: torch.Tensor,
        up_EFD: torch.Tensor,
        down_EDF: torch.Tensor,
        products: Products,
    ) -> torch.Tensor:
        x, g, u = products.cut(rows_ND), [], []
        memory, y = products.room(rows_ND)
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        for n, x_ND in enumerate(x):
            g.append(products.forward(x_ND, gate[n]))
            u.append(products.forward(x_ND, up[n]))
            y[n] = products.forward(F.silu(g[n]).mul_(u[n]), down[n], y[n])
        ctx.products, ctx.pieces = products, len(x)
        ctx.save_for_backward(gate_EFD, up_EFD, down_EDF, *x, *g, *u)
        return products.whole(memory, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_EFD, up_EFD, down_EDF, *saved = ctx.saved_tensors
        products, pieces = ctx.products, ctx.pieces
        x, g, u = saved[:pieces], saved[pieces : 2 * pieces], saved[2 * pieces :]
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        d_y = products.cut(d_rows_ND)
        memory, d_x = products.room(d_rows_ND)
        d_gate, d_up, d_down = (
            _WeightGradient(weight, products, wanted=wanted)
            for weight, wanted in zip((gate_EFD, up_EFD, down_EDF), ctx.needs_input_grad[1:4], strict=True)
        )
        for n in range(pieces):
            silu_NF = F.silu(g[n])
            d_h_NF = products.backward(d_y[n], down[n])
            d_down.add(d_y[n], silu_NF * u[n])
            d_u_NF = silu_NF.mul_(d_h_NF)
            d_up.add(d_u_NF, x[n])
            d_g_NF = torch.ops.aten.silu_backward(d_h_NF.mul_(u[n]), g[n])
            d_gate.add(d_g_NF, x[n])
            if ctx.needs_input_grad[0]:
                d_x[n] = products.backward(d_u_NF, up[n], d_x[n])
                d_x[n] = products.backward(d_g_NF, gate[n], d_x[n], add=True)
        whole_ND = products.whole(memory, d_x) if ctx.needs_input_grad[0] else None
        return whole_ND, d_gate.result(), d_up.result(), d_down.result(), None
