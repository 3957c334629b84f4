"""silu(gate) * up, which a precision may hold for the backward pass in fewer bits.

Plain autograd keeps three tensors for it, and the layer that reads it a fourth. Where that layer's products
can hold activations more narrowly, only gate and up are kept, in that form, and the output is made again.

Shapes: F feed-forward width.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.3 (the inputs of SwiGLU in FP8, its output recomputed).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.pipeline.weight_gradients import in_use
from nanotrain_core.precision.gemm import Kept, MadeAgain, make_again, products_of


def swiglu(gate: torch.Tensor, up: torch.Tensor, down: nn.Module) -> torch.Tensor:
    """Return silu(gate) * up [..., F], which ``down``, a linear layer, reads next."""
    narrowing: Any = products_of(down).get("weight")
    if not hasattr(narrowing, "narrow") or not gate.requires_grad:
        return F.silu(gate) * up
    kept = [narrowing.narrow(each.detach().reshape(-1, each.shape[-1])) for each in (gate, up)]
    if None in kept:
        return F.silu(gate) * up
    inputs = Inputs(narrowing, gate.dtype)
    again = MadeAgain((*kept[0], *kept[1]), inputs.product)
    h: torch.Tensor = _SwiGLU.apply(gate, up, inputs, *again.of)  # type: ignore[no-untyped-call]
    return make_again(h, again)


class Inputs:
    """Reads gate and up [M, F] of what was kept of both: for ``down``'s gradient, and for their own.

    The second follows on the first, and finds what that has read, unless weight gradients wait: then both
    read, so that nothing wide is held meanwhile.
    """

    def __init__(self, narrowing: Any, dtype: torch.dtype) -> None:
        self.narrowing, self.dtype = narrowing, dtype
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def read(self, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        found, self._last = self._last, None
        if found is None:
            half = len(kept) // 2
            gate, up = (self.narrowing.widen(each, self.dtype) for each in (kept[:half], kept[half:]))
            found = gate, up
            self._last = None if in_use() else found
        return found

    def product(self, *kept: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        gate_MF, up_MF = self.read(kept)
        return F.silu(gate_MF).mul_(up_MF)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, inputs: Inputs, *kept: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs, ctx.kept = inputs, len(kept)
        ctx.save_for_backward(*kept)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = (x.view_as(d_h) for x in ctx.inputs.read(ctx.saved_tensors))
        d_gate = torch.ops.aten.silu_backward(d_h * up, gate)
        return d_gate, d_h * F.silu(gate), None, *(None,) * ctx.kept
