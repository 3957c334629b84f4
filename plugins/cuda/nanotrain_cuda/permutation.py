"""Permutation of rows between tokens and experts: one kernel each way, as operators of a compiled graph.

Both directions iterate over tokens, not over rows. A token's row is read once and written to its C places, or
its C rows are gathered and summed in float32 in the order of the router's choices: without atomics, so that
results are deterministic. On a GPU, or in Triton's interpreter, they are Triton kernels; on a CPU, plain
indexing, which is also the reference for the tests of the kernels.

Shapes: T tokens, C experts chosen for each, N = T C rows, D width; ``back`` [N]: the row of each token's
choices, a permutation.
"""

from __future__ import annotations

import os
from typing import Any

import torch

Tensor = torch.Tensor


def permute(x_TD: Tensor, order_N: Tensor, back_N: Tensor, chosen: int) -> Tensor:
    """Return what :func:`nanotrain_core.models.ops.permute` does."""
    rows: Tensor = spread(x_TD, back_N, chosen)
    return rows


def unpermute(outputs_ND: Tensor, order_N: Tensor, back_N: Tensor, weights_TC: Tensor) -> Tensor:
    """Return what :func:`nanotrain_core.models.ops.unpermute` does, weighed and added up in float32."""
    y: Tensor = weigh(outputs_ND, back_N, weights_TC)
    return y


def in_triton(x: Tensor) -> bool:
    """Return whether Triton can compute on ``x``."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, at least float32."""
    return torch.promote_types(dtype, torch.float32)


# --- operators ----------------------------------------------------------------------------------


@torch.library.custom_op("nanotrain_cuda::spread", mutates_args=())
def spread(x: Tensor, back: Tensor, chosen: int) -> Tensor:
    """Return rows [N, D]: row ``back[t C + c]`` is token t's. Gradient: :func:`add_up`."""
    if in_triton(x):
        from nanotrain_cuda import triton_permutation

        return triton_permutation.spread(x, back, chosen)
    rows = x.new_empty(len(back), x.shape[1])
    return rows.index_copy_(0, back, x.repeat_interleave(chosen, 0))


@torch.library.custom_op("nanotrain_cuda::add_up", mutates_args=())
def add_up(rows: Tensor, back: Tensor, chosen: int) -> Tensor:
    """Return the sum of each token's rows [T, D]. Gradient: :func:`spread`."""
    if in_triton(rows):
        from nanotrain_cuda import triton_permutation

        return triton_permutation.add_up(rows, back, chosen, None)
    each_TCD = rows.index_select(0, back).view(len(back) // chosen, chosen, rows.shape[1])
    return each_TCD.sum(1, dtype=_wide(rows.dtype)).to(rows.dtype)


@torch.library.custom_op("nanotrain_cuda::weigh", mutates_args=())
def weigh(rows: Tensor, back: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's rows [T, D], times its ``weights`` [T, C]."""
    if in_triton(rows):
        from nanotrain_cuda import triton_permutation

        return triton_permutation.add_up(rows, back, weights.shape[1], weights)
    wide = _wide(rows.dtype)
    each_TCD = rows.index_select(0, back).view(*weights.shape, rows.shape[1]).to(wide)
    return (each_TCD * weights.to(wide).unsqueeze(-1)).sum(1).to(rows.dtype)


@torch.library.custom_op("nanotrain_cuda::weigh_backward", mutates_args=())
def weigh_backward(d_y: Tensor, rows: Tensor, back: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``rows`` and ``weights`` of :func:`weigh`, in one pass; they have none."""
    if in_triton(rows):
        from nanotrain_cuda import triton_permutation

        return triton_permutation.weigh_backward(d_y, rows, back, weights)
    wide = _wide(rows.dtype)
    d_each_TCD = d_y.to(wide).unsqueeze(1) * weights.to(wide).unsqueeze(-1)
    d_rows = rows.new_empty(rows.shape).index_copy_(0, back, d_each_TCD.flatten(0, 1).to(rows.dtype))
    each_TCD = rows.index_select(0, back).view(*weights.shape, rows.shape[1]).to(wide)
    return d_rows, (each_TCD * d_y.to(wide).unsqueeze(1)).sum(-1).to(weights.dtype)


# --- what a graph must know of them -------------------------------------------------------------


@spread.register_fake
def _(x: Tensor, back: Tensor, chosen: int) -> Tensor:
    return x.new_empty(back.shape[0], x.shape[1])


@add_up.register_fake
def _(rows: Tensor, back: Tensor, chosen: int) -> Tensor:
    return rows.new_empty(back.shape[0] // chosen, rows.shape[1])


@weigh.register_fake
def _(rows: Tensor, back: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


@weigh_backward.register_fake
def _(d_y: Tensor, rows: Tensor, back: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _keep_back(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    _, back, ctx.chosen = inputs
    ctx.save_for_backward(back)


def _spread_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
    return add_up(d_rows, *ctx.saved_tensors, ctx.chosen), None, None


def _add_up_backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
    return spread(d_y, *ctx.saved_tensors, ctx.chosen), None, None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weigh_backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    d_rows, d_weights = weigh_backward(d_y, *ctx.saved_tensors)
    wants_rows, _, wants_weights = ctx.needs_input_grad
    return d_rows if wants_rows else None, None, d_weights if wants_weights else None


spread.register_autograd(_spread_backward, setup_context=_keep_back)
add_up.register_autograd(_add_up_backward, setup_context=_keep_back)
weigh.register_autograd(_weigh_backward, setup_context=_keep)
