"""silu(gate) * up whose inputs are kept for the backward pass in fewer bits.

Plain autograd keeps three tensors for it, and the linear layer that reads it a fourth. Where that layer's
GEMM backend can hold activations in fewer bits, only gate and up are kept, in that form, and the output is
recomputed.

Shapes: F feed-forward width.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.3 (the inputs of SwiGLU in FP8, its output recomputed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import Role, tag_of
from nanotrain_core.models.ops import Ops
from nanotrain_core.precision.gemm import Kept, LinearGEMMs, QuantizedActivations, gemms_of


def quantize_swiglu(part: nn.Module) -> None:
    """Have each feed-forward layer keep its gate and up as the backend of its ROW layer quantizes them.

    That is a module with a table of functions, ``ops``, and one child of role ROW, which reads what
    ``ops.swiglu`` returned.
    """
    for module in part.modules():
        ops = vars(module).get("ops")
        rows = [child for child in module.children() if (tag := tag_of(child)) and tag.role is Role.ROW]
        gemms = gemms_of(rows[0]) if isinstance(ops, Ops) and len(rows) == 1 else None
        backend = gemms.backends.get("weight") if gemms else None
        if isinstance(backend, QuantizedActivations):
            cast(Any, module).ops = replace(ops, swiglu=QuantizedSwiGLU(backend, gemms))


class QuantizedSwiGLU:
    """The ``swiglu`` of one feed-forward layer."""

    def __init__(self, backend: QuantizedActivations, gemms: LinearGEMMs) -> None:
        self.backend, self.gemms = backend, gemms

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [..., F], and offer the layer that reads it how to recompute it."""
        if not gate.requires_grad:
            return F.silu(gate) * up
        kept = [self.backend.quantize(each.detach().reshape(-1, each.shape[-1])) for each in (gate, up)]
        if None in kept:
            return F.silu(gate) * up
        of_gate, of_up = cast(list[Kept], kept)
        inputs = _Inputs(self, gate.dtype)
        h: torch.Tensor = _SwiGLU.apply(gate, up, inputs, *of_gate, *of_up)  # type: ignore[no-untyped-call]
        self.gemms.recomputed.offer(h, (*of_gate, *of_up), inputs.product)
        return h


class _Inputs:
    """Reads gate and up [M, F] of what was kept of both: for the wgrad of what reads them, and for their own.

    The second follows on the first, and finds what that has read, unless weight gradients are deferred: then
    both read, so that nothing wide is held meanwhile.
    """

    def __init__(self, swiglu: QuantizedSwiGLU, dtype: torch.dtype) -> None:
        self.swiglu, self.dtype = swiglu, dtype
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def read(self, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        found, self._last = self._last, None
        if found is None:
            half, dequantize = len(kept) // 2, self.swiglu.backend.dequantize
            gate, up = (dequantize(each, self.dtype) for each in (kept[:half], kept[half:]))
            found = gate, up
            self._last = None if self.swiglu.gemms.passes.splits_backward else found
        return found

    def product(self, *kept: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        gate_MF, up_MF = self.read(kept)
        return F.silu(gate_MF).mul_(up_MF)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, inputs: _Inputs, *kept: torch.Tensor
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
