"""Stacked SwiGLU experts: all GEMMs of one expert while its rows are in cache, or batched over experts.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_cpu.grouped import Products, choose_products


def experts(
    rows_ND: torch.Tensor,
    counts_E: torch.Tensor,
    gate_EFD: torch.Tensor,
    up_EFD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.experts` does."""
    products = choose_products(rows_ND, counts_E.tolist(), gate_EFD)
    y_ND: torch.Tensor = _Experts.apply(rows_ND, gate_EFD, up_EFD, down_EDF, products)  # type: ignore[no-untyped-call]
    return y_ND


class _Experts(torch.autograd.Function):
    """Forward: y = down(h), h = silu(gate(x)) up(x). Backward recomputes h: it is cheap and large."""

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
        memory, y = products.room(rows_ND, rows_ND.shape[1])
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        for n, x_ND in enumerate(x):
            g.append(products.forward(x_ND, gate[n]))
            u.append(products.forward(x_ND, up[n]))
            products.forward(F.silu(g[n]).mul_(u[n]), down[n], y[n])
        ctx.products = products
        ctx.save_for_backward(gate_EFD, up_EFD, down_EDF, *x, *g, *u)
        return products.whole(memory)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_EFD, up_EFD, down_EDF, *saved = ctx.saved_tensors
        products, pieces = ctx.products, len(saved) // 3
        x, g, u = saved[:pieces], saved[pieces : 2 * pieces], saved[2 * pieces :]
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        d_y = products.cut(d_y_ND)
        memory, d_x = products.room(d_y_ND, d_y_ND.shape[1])
        d_weights = [torch.empty_like(weight) for weight in (gate_EFD, up_EFD, down_EDF)]
        d_gate, d_up, d_down = map(products.weights, d_weights)
        for n in range(pieces):
            silu_NF = F.silu(g[n])
            d_h_NF = products.dgrad(d_y[n], down[n], None)
            products.wgrad(d_y[n], silu_NF * u[n], d_down[n])
            d_u_NF = silu_NF.mul_(d_h_NF)
            products.wgrad(d_u_NF, x[n], d_up[n])
            d_g_NF = torch.ops.aten.silu_backward(d_h_NF.mul_(u[n]), g[n])
            products.wgrad(d_g_NF, x[n], d_gate[n])
            if ctx.needs_input_grad[0]:
                products.dgrad(d_u_NF, up[n], d_x[n])
                products.dgrad(d_g_NF, gate[n], d_x[n], add=True)
        whole_ND = products.whole(memory) if ctx.needs_input_grad[0] else None
        return whole_ND, *d_weights, None
