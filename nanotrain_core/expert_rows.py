"""A row for each token and each of its experts, and the way back: gathers in both directions.

Written by hand because autograd's backward of a gather fills zeros and adds row by row, with atomics on a
GPU. Here every gradient is a gather too: the order of a permutation is known both ways.

Shapes: T tokens, K experts chosen for each, N = T K rows in the order of experts, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def inverted(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation [N] that undoes ``order`` [N]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def spread(x_TD: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return rows [N, D]: the token of each of its ``chosen`` K choices, sorted into ``order_N``.

    ``back_N`` is its :func:`inverted`.
    """
    rows_ND: torch.Tensor = _Spread.apply(x_TD, order_N, back_N, chosen)  # type: ignore[no-untyped-call]
    return rows_ND


def combine(
    outputs_ND: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Return each token's weighted sum [T, D] of its experts' outputs, in the order its router named them."""
    y_TD: torch.Tensor = _Combine.apply(outputs_ND, order_N, back_N, weights_TK)  # type: ignore[no-untyped-call]
    return y_TD


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.shape = len(x_TD), chosen, x_TD.shape[1]
        ctx.save_for_backward(back_N)
        return x_TD.index_select(0, order_N // chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_N,) = ctx.saved_tensors
        return d_rows_ND.index_select(0, back_N).view(ctx.shape).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: torch.Tensor,
        order_N: torch.Tensor,
        back_N: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        outputs_TKD = outputs_ND.index_select(0, back_N).view(*weights_TK.shape, outputs_ND.shape[1])
        ctx.save_for_backward(outputs_TKD, order_N, weights_TK)
        return (weights_TK.unsqueeze(1).to(outputs_ND.dtype) @ outputs_TKD).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs_TKD, order_N, weights_TK = ctx.saved_tensors
        d_outputs_ND = d_weights_TK = None
        if ctx.needs_input_grad[0]:
            weight_N = weights_TK.flatten().index_select(0, order_N).to(d_y_TD.dtype)
            d_outputs_ND = d_y_TD.index_select(0, order_N // weights_TK.shape[1]).mul_(weight_N.unsqueeze(1))
        if ctx.needs_input_grad[3]:
            d_weights_TK = (outputs_TKD @ d_y_TD.unsqueeze(2)).squeeze(2).to(weights_TK.dtype)
        return d_outputs_ND, None, None, d_weights_TK
