"""Passes a wgrad out of a compiled graph in higher precision than its weight, such as float32 for bfloat16.

AOTAutograd, which traces a graph's backward pass, ignores a parameter's ``grad_dtype`` and casts a
gradient to the dtype of its tensor. In a graph a layer therefore reads its weight detached, and passes
the gradient to a carrier: an input of the graph without storage, with the gradient's dtype and the weight's
shape, created outside the graph. From there eager autograd passes it to the parameter unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def wgrad_carrier(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the receiver of ``weight``'s gradient in a graph's next call; None: the weight itself.

    None if the weight has no gradient, or one of its own dtype. Create one for each call, outside graphs.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if weight.grad_dtype is None or weight.grad_dtype == weight.dtype:
        return None
    carrier: torch.Tensor = _Carry.apply(weight)  # type: ignore[no-untyped-call]
    return carrier


class _Carry(torch.autograd.Function):
    """Forward: an undefined tensor in the shape of the weight. Backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return weight.new_empty((), dtype=weight.grad_dtype).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weight: torch.Tensor | None) -> torch.Tensor | None:
        return d_weight
