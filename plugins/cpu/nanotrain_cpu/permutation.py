"""A row for each token and each of its experts, and the way back: gathers in both directions.

Autograd's backward of a gather fills zeros and adds row by row. Here every gradient is a gather too: the
order of a permutation is known both ways. Rows of a token are added up by ``embedding_bag``, which reads them
where they are and sums bfloat16 in float32.

Shapes: T tokens, K experts chosen for each, N = T K rows in the order of experts, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def permute(x_TD: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.permute` does."""
    rows_ND: torch.Tensor = _Permute.apply(x_TD, order_N, back_N, chosen)  # type: ignore[no-untyped-call]
    return rows_ND


def unpermute(
    outputs_ND: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.unpermute` does."""
    y_TD: torch.Tensor = _Unpermute.apply(outputs_ND, order_N, back_N, weights_TK)  # type: ignore[no-untyped-call]
    return y_TD


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, order_N: torch.Tensor, back_N: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.chosen = chosen
        ctx.save_for_backward(back_N)
        return x_TD.index_select(0, order_N // chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_N,) = ctx.saved_tensors
        return F.embedding_bag(back_N.view(-1, ctx.chosen), d_rows_ND, mode="sum"), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: torch.Tensor,
        order_N: torch.Tensor,
        back_N: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(outputs_ND, order_N, back_N, weights_TK)
        each_TK = weights_TK.to(outputs_ND.dtype)
        return F.embedding_bag(back_N.view_as(each_TK), outputs_ND, mode="sum", per_sample_weights=each_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs_ND, order_N, back_N, weights_TK = ctx.saved_tensors
        d_outputs_ND = d_y_TD.index_select(0, order_N // weights_TK.shape[1])
        d_weights_TK = None
        if ctx.needs_input_grad[3]:
            d_weights_N = (outputs_ND * d_outputs_ND).sum(1, dtype=weights_TK.dtype)
            d_weights_TK = d_weights_N.index_select(0, back_N).view_as(weights_TK)
        weights_N = weights_TK.flatten().index_select(0, order_N).to(d_y_TD.dtype)
        return d_outputs_ND.mul_(weights_N.unsqueeze(1)), None, None, d_weights_TK
