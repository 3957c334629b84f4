"""The way of a wgrad out of a compiled graph that is wider than its weight, as a float32 one of bfloat16.

AOTAutograd, which traces a graph's backward pass, knows nothing of a parameter's ``grad_dtype``, and has a
gradient cast to the dtype of what it is of. In a graph a layer therefore reads its weight detached, and gives
the gradient to a carrier: an input of the graph without storage, of the gradient's dtype and the weight's
shape, made outside of the graph. From there it gets to the parameter by eager autograd, as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def wgrad_carrier(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what takes the gradient of ``weight`` in the next call of a graph; None: the weight itself does.

    That is so where there is none, or none of another dtype. Make one for each call, outside of graphs.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if weight.grad_dtype is None or weight.grad_dtype == weight.dtype:
        return None
    carrier: torch.Tensor = _Carry.apply(weight)  # type: ignore[no-untyped-call]
    return carrier


class _Carry(torch.autograd.Function):
    """Forward: nothing to read, in the shape of the weight. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return weight.new_empty((), dtype=weight.grad_dtype).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weight: torch.Tensor | None) -> torch.Tensor | None:
        return d_weight
