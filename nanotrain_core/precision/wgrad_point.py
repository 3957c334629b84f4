"""Computes a wgrad at a later point of the same backward pass, overlapping a more urgent operation.

Autograd runs operations in the reverse order of forward. Create a point, then call the operation that is
urgent in backward (whose backward is the all-reduce of the dgrad), then the layer: backward is the layer's
dgrad, the launch of the all-reduce, then the wgrad, which overlaps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.pipeline.weight_gradients import WgradFn

#: A tensor to save for backward, and a function that begins to compute the input from it and returns a wait.
RecomputedInput = tuple[torch.Tensor, Callable[[torch.Tensor], WgradFn]]


class WgradPoint:
    """The point in a backward pass at which the wgrad of one use of a weight is computed."""

    def __init__(self, weight: torch.Tensor, recompute: RecomputedInput | None = None) -> None:
        """``recompute``: how the layer recomputes its input in backward instead of saving it."""
        self.recompute = recompute
        self.left: list[WgradFn] = []
        self.handle: torch.Tensor = _Make.apply(weight, self.left)  # type: ignore[no-untyped-call]
        """An input of the layer's autograd function, which returns no gradient for it."""


class _Make(torch.autograd.Function):
    """Forward: a handle. Backward: the deferred wgrad, if there is one."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, left: list[WgradFn]) -> torch.Tensor:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_handle: None) -> tuple[torch.Tensor | None, None]:
        return ctx.left.pop()() if ctx.left else None, None
