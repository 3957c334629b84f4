"""SwiGLU experts whose products a precision makes, for all experts of the rank at once.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.pipeline.weight_gradients import weight_gradient
from nanotrain_core.precision.gemm import GEMMBackend, Kept


def given_swiglu(
    rows_ND: torch.Tensor, counts_E: torch.Tensor, experts: nn.Module, given: Mapping[str, GEMMBackend]
) -> torch.Tensor:
    """Return the outputs [N, D] of ``experts``, which have stacked weights gate, up and down.

    Args:
        rows_ND: sorted by expert.
        counts_E: rows of each.
        experts: whose products they are.
        given: who makes the products of each weight.
    """
    grouped = {products: products.grouped(counts_E) for products in set(given.values())}
    products = tuple(grouped[given[name]] for name in ("gate", "up", "down"))
    weights = (experts.gate, experts.up, experts.down)
    y_ND: torch.Tensor = _GivenSwiGLU.apply(rows_ND, *weights, products)  # type: ignore[no-untyped-call]
    return y_ND


class _GivenSwiGLU(torch.autograd.Function):
    """Forward: y = down(h), h = silu(gate(x)) up(x). Backward makes h again, and its narrow form too.

    Of gate(x) and up(x) it keeps what ``down``'s products narrow them to, if they do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        gate_EFD: torch.Tensor,
        up_EFD: torch.Tensor,
        down_EDF: torch.Tensor,
        products: tuple[GEMMBackend, GEMMBackend, GEMMBackend],
    ) -> torch.Tensor:
        of_gate, of_up, of_down = products
        if of_gate is of_up:  # then they read one form of x
            (g_NF, u_NF), x_gate = of_gate.forward(rows_ND, gate_EFD, up_EFD)
            x_up = x_gate
        else:
            (g_NF,), x_gate = of_gate.forward(rows_ND, gate_EFD)
            (u_NF,), x_up = of_up.forward(rows_ND, up_EFD)
        (y_ND,), _ = of_down.forward(F.silu(g_NF).mul_(u_NF), down_EDF)
        g, u = (_narrow(of_down, x_NF) for x_NF in (g_NF, u_NF))
        ctx.dtype = g_NF.dtype if g and u else None
        g, u = g or (g_NF,), u or (u_NF,)
        ctx.products, ctx.cuts = products, (len(g), len(u), len(x_gate), len(x_up))
        ctx.save_for_backward(gate_EFD, up_EFD, down_EDF, *g, *u, *x_gate, *x_up)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_EFD, up_EFD, down_EDF, *kept = ctx.saved_tensors
        of_gate, of_up, of_down = ctx.products
        rest = iter(kept)
        g, u, x_gate, x_up = (tuple(islice(rest, count)) for count in ctx.cuts)
        g_NF, u_NF = (of_down.widen(each, ctx.dtype) if ctx.dtype else each[0] for each in (g, u))
        silu_NF = F.silu(g_NF)
        d_h_NF = of_down.input_gradient(d_y_ND, down_EDF)
        d_u_NF = d_h_NF * silu_NF
        d_g_NF = torch.ops.aten.silu_backward(d_h_NF.mul_(u_NF), g_NF)
        h_NF, d_x_ND = silu_NF.mul_(u_NF), None
        if ctx.needs_input_grad[0]:
            d_x_ND = of_gate.input_gradient(d_g_NF, gate_EFD).add_(of_up.input_gradient(d_u_NF, up_EFD))
        of_weights = (
            (gate_EFD, lambda: of_gate.weight_gradient(d_g_NF, x_gate)),
            (up_EFD, lambda: of_up.weight_gradient(d_u_NF, x_up)),
            (down_EDF, lambda: of_down.weight_gradient(d_y_ND, of_down.keep(h_NF))),
        )
        wanted = zip(of_weights, ctx.needs_input_grad[1:4], strict=True)
        return d_x_ND, *(weight_gradient(*each) if needed else None for each, needed in wanted), None


def _narrow(products: GEMMBackend, x_NF: torch.Tensor) -> Kept | None:
    """Return a narrow form of what an input is made of, if ``products`` have one."""
    kept: Kept | None = products.narrow(x_NF) if hasattr(products, "narrow") else None
    return kept
