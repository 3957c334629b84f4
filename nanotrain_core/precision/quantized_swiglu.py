"""silu(gate) * up whose inputs are saved quantized for the backward pass.

Plain autograd saves three tensors for it, and the linear layer that reads it a fourth. Where that layer's
GEMM backend supports quantized activations, only gate and up are saved, in that form, and the output is
recomputed. A backend may have one kernel for all of it: then the layer reads that kernel's quantized output,
and in a compiled graph the unquantized output is never written.

Shapes: F feed-forward width.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.3 (the inputs of SwiGLU in FP8, its output recomputed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import Role, tag_of
from nanotrain_core.models.ops import Ops, swiglu
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import QuantizedActivations, SavedTensors, gemms_of


def quantize_swiglu(part: nn.Module) -> None:
    """Make each feed-forward layer save its gate and up as the backend of its ROW layer quantizes them.

    Such a layer is a module with a table of functions, ``ops``, and one child of role ROW, which reads the
    result of ``ops.swiglu``. Call it once for a part, after its layers have their backends.
    """
    for module in part.modules():
        ops = vars(module).get("ops")
        rows = [child for child in module.children() if (tag := tag_of(child)) and tag.role is Role.ROW]
        if isinstance(ops, Ops) and len(rows) == 1 and _backend_of(rows[0]) is not None:
            cast(Any, module).ops = replace(ops, swiglu=QuantizedSwiGLU(ops.swiglu, rows[0]))


def _backend_of(row: nn.Module) -> QuantizedActivations | None:
    """Return the backend that quantizes the inputs of ``row``, if there is one."""
    gemms = gemms_of(row)
    backend = gemms.backends.get("weight") if gemms else None
    return backend if isinstance(backend, QuantizedActivations) else None


class QuantizedSwiGLU:
    """The ``swiglu`` of one feed-forward layer."""

    def __init__(self, plain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], row: nn.Module) -> None:
        """``plain``: the unquantized function; ``row``: the layer that reads the result."""
        self.plain, self.row = plain, row

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [..., F], and offer its recomputation to the layer that reads it."""
        backend, gemms = _backend_of(self.row), gemms_of(self.row)
        if backend is None or gemms is None or not (torch.is_grad_enabled() and gate.requires_grad):
            return self.plain(gate, up)
        gate_MF, up_MF = (each.detach().reshape(-1, each.shape[-1]) for each in (gate, up))
        # In a graph torch's own h is written only if something else reads it.
        whole = not torch.compiler.is_compiling()
        made = backend.swiglu(gate_MF, up_MF, whole=whole) if self.plain is swiglu else None
        plain, read = self.plain, cast(SavedTensors, ())
        if made is None:
            kept = [backend.quantize(each) for each in (gate_MF, up_MF)]
            if any(each is None for each in kept):
                return self.plain(gate, up)
            of_gate, of_up = cast("list[SavedTensors]", kept)
        else:
            h_MF, of_gate, of_up = made
            read = h_MF.forms
            if whole:
                plain = partial(_given, cast(torch.Tensor, h_MF.whole))
        inputs = _Inputs(backend, gemms.passes, gate.dtype)
        h: torch.Tensor = _SwiGLU.apply(gate, up, plain, inputs, *of_gate, *of_up)  # type: ignore[no-untyped-call]
        gemms.recomputed.offer(h, (*of_gate, *of_up), inputs.product, read)
        return h


def _given(h_MF: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, which a backend has computed: no view of it, so that it may be written to."""
    h: torch.Tensor = torch.ops.aten._unsafe_view(h_MF, gate.shape)
    return h


class _Inputs:
    """Dequantizes gate and up [M, F], for the wgrad of the layer that reads h and for their own gradients.

    h is silu(gate) * up.

    The gradients follow the wgrad and reuse its dequantized values. If the wgrad is left to a W pass, each
    dequantizes separately, so that nothing is held in the run's dtype in between.
    """

    def __init__(self, backend: QuantizedActivations, passes: Passes, dtype: torch.dtype) -> None:
        self.backend, self.passes, self.dtype = backend, passes, dtype
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def product(self, *kept: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, quantized already if the backend does both at once."""
        half = len(kept) // 2
        at_once = self.backend.recompute_swiglu(kept[:half], kept[half:], self.dtype)
        if at_once is not None:
            return cast(torch.Tensor, at_once)
        gate_MF, up_MF = found = self._dequantized(kept)
        if not torch.compiler.is_compiling():  # a compiler eliminates common subexpressions of a graph itself
            in_w_pass = self.passes.splits_backward and not self.passes.in_backward
            self._last = None if in_w_pass else found
        return F.silu(gate_MF).mul_(up_MF)

    def take(self, kept: SavedTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up, dequantized, and drop the cached ones."""
        if torch.compiler.is_compiling():
            return self._dequantized(kept)
        found, self._last = self._last, None
        return found or self._dequantized(kept)

    def _dequantized(self, kept: SavedTensors) -> tuple[torch.Tensor, torch.Tensor]:
        half, dequantize = len(kept) // 2, self.backend.dequantize
        return dequantize(kept[:half], self.dtype), dequantize(kept[half:], self.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        plain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        inputs: _Inputs,
        *kept: torch.Tensor,
    ) -> torch.Tensor:
        ctx.inputs, ctx.kept = inputs, len(kept)
        ctx.save_for_backward(*kept)
        return plain(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = (x.view_as(d_h) for x in ctx.inputs.take(ctx.saved_tensors))
        d_gate = torch.ops.aten.silu_backward(d_h * up, gate)
        return d_gate, d_h * F.silu(gate), None, None, *(None,) * ctx.kept
