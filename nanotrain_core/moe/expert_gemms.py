"""SwiGLU experts whose GEMMs a backend computes, for all experts of the rank at once.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import tag_of
from nanotrain_core.models.ops import ops_of
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm_backend import (
    GEMMBackend,
    QuantizedActivations,
    SavedTensors,
    as_prepared,
    deferred_wgrad,
)


def use_expert_gemms(
    module: nn.Module,
    backends: Mapping[str, GEMMBackend],
    prepared: Mapping[str, SavedTensors],
    carriers: Mapping[str, torch.Tensor | None],
    passes: Passes,
) -> None:
    """Replace ``ops.experts`` of a module of role EXPERTS by one that uses ``backends``.

    Args:
        module: its tag has ``gemm_weights``: the parameters passed to ``ops.experts``.
        backends: for each of them; read in every call.
        prepared: by parameter, the prepared form that a compiled graph reads instead of the weight.
        carriers: by parameter, the tensor to which a compiled graph returns its wgrad; None: the
            parameter itself. See ``wgrad_carrier``.
        passes: of the run.
    """
    found = tag_of(module)
    assert found is not None
    names = found.gemm_weights

    def experts(rows_ND: torch.Tensor, counts_E: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        of_gate, of_up, of_down = (backends[name] for name in names)
        gate = of_gate.grouped(counts_E)
        up = gate if of_up is of_gate else of_up.grouped(counts_E)
        down = gate if of_down is of_gate else up if of_down is of_up else of_down.grouped(counts_E)
        compiling = torch.compiler.is_compiling()
        forms = [prepared.get(name, ()) if compiling else () for name in names]
        flat = tuple(chain.from_iterable(forms))
        taken_by = [carriers.get(name) if compiling else None for name in names]
        read = [w if carrier is None else w.detach() for w, carrier in zip(weights, taken_by, strict=True)]
        y_ND: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            rows_ND, *read, *taken_by, (gate, up, down), passes, tuple(map(len, forms)), *flat
        )
        return y_ND

    cast(Any, module).ops = replace(ops_of(module), experts=experts)


class _Experts(torch.autograd.Function):
    """Forward: y = down(h), h = silu(gate(x)) up(x). Backward recomputes h, and its quantized form too.

    It keeps gate(x) and up(x) as quantized by ``down``'s backend, if that quantizes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        gate_EFD: torch.Tensor,
        up_EFD: torch.Tensor,
        down_EDF: torch.Tensor,
        carrier_of_gate: torch.Tensor | None,
        carrier_of_up: torch.Tensor | None,
        carrier_of_down: torch.Tensor | None,
        backends: tuple[GEMMBackend, GEMMBackend, GEMMBackend],
        passes: Passes,
        counts: tuple[int, int, int],
        *forms: torch.Tensor,
    ) -> torch.Tensor:
        of_gate, of_up, of_down = backends
        weights = gate_EFD, up_EFD, down_EDF
        gate, up, down = _prepared(weights, forms, counts)
        if of_gate is of_up:  # then they use the same form of x
            (g_NF, u_NF), x_gate = of_gate.forward(rows_ND, gate, up)
            x_up = x_gate
        else:
            (g_NF,), x_gate = of_gate.forward(rows_ND, gate)
            (u_NF,), x_up = of_up.forward(rows_ND, up)
        y_ND, g, u = _down(of_down, g_NF, u_NF, down)
        if not any(ctx.needs_input_grad[1:7]):  # frozen: nothing reads the rows again
            x_gate = x_up = ()
        ctx.dtype = g_NF.dtype if g and u else None
        g, u = g or (g_NF,), u or (u_NF,)
        ctx.backends, ctx.passes, ctx.counts = backends, passes, counts
        ctx.cuts = (len(forms), len(g), len(u), len(x_gate), len(x_up))
        ctx.save_for_backward(*weights, *forms, *g, *u, *x_gate, *x_up)
        # Activation checkpointing saves detached copies, but gradient hooks are on the parameters themselves,
        # and a backend that caches a form of a weight identifies the weight by its parameter.
        ctx.parameters = None if torch.compiler.is_compiling() else weights
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_EFD, up_EFD, down_EDF, *kept = ctx.saved_tensors
        of_gate, of_up, of_down = ctx.backends
        rest = iter(kept)
        forms, g, u, x_gate, x_up = (tuple(islice(rest, count)) for count in ctx.cuts)
        weights = ctx.parameters or (gate_EFD, up_EFD, down_EDF)
        gate, up, down = _prepared(weights, forms, ctx.counts)
        h_NF, d_g_NF, d_u_NF = _swiglu_backward(of_down, g, u, of_down.dgrad(d_y_ND, down), ctx.dtype)
        d_x_ND = None
        if ctx.needs_input_grad[0]:
            d_x_ND = of_gate.dgrad(d_g_NF, gate).add_(of_up.dgrad(d_u_NF, up))
        operands: tuple[tuple[GEMMBackend, torch.Tensor, Callable[[], SavedTensors]], ...] = (
            (of_gate, d_g_NF, lambda: x_gate),
            (of_up, d_u_NF, lambda: x_up),
            (of_down, d_y_ND, lambda: of_down.save_for_wgrad(h_NF)),
        )
        to_each = ctx.needs_input_grad[1:7]  # the weights, or their carriers
        wanted = zip(weights, operands, to_each[:3], to_each[3:], strict=True)
        made = [
            ctx.passes.weight_gradient(weight, partial(_wgrad, *of), partial(deferred_wgrad, *of))
            if any(needed)
            else None
            for weight, of, *needed in wanted
        ]
        gradients = [each if needed else None for each, needed in zip(2 * made, to_each, strict=True)]
        return d_x_ND, *gradients, *(None,) * (3 + len(forms))


def _wgrad(backend: GEMMBackend, d_y: torch.Tensor, save: Callable[[], SavedTensors]) -> torch.Tensor:
    return backend.wgrad(d_y, save())


def _prepared(
    weights: Sequence[torch.Tensor], forms: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return each weight with its prepared form."""
    rest = iter(forms)
    return [
        as_prepared(weight, tuple(islice(rest, count))) for weight, count in zip(weights, counts, strict=True)
    ]


def _down(
    backend: GEMMBackend, g_NF: torch.Tensor, u_NF: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, SavedTensors | None, SavedTensors | None]:
    """Return silu(g) u times the transposed weights, and g and u quantized, if the backend stores them so."""
    made = backend.swiglu(g_NF, u_NF) if isinstance(backend, QuantizedActivations) else None
    if made is not None:  # in one kernel
        h_NF, of_g, of_u = made
        (y_ND,), _ = backend.forward(cast(torch.Tensor, h_NF), down)
        return y_ND, of_g, of_u
    (y_ND,), _ = backend.forward(F.silu(g_NF).mul_(u_NF), down)
    return y_ND, _quantize(backend, g_NF), _quantize(backend, u_NF)


def _swiglu_backward(
    backend: GEMMBackend, g: SavedTensors, u: SavedTensors, d_h_NF: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return h = silu(g) u, for the wgrad that reads it, and the gradients of g and u.

    ``dtype``: of g and u, if they were saved quantized. ``d_h`` may be overwritten.
    """
    if dtype is None:
        (g_NF,), (u_NF,) = g, u
    else:
        quantizing = cast(QuantizedActivations, backend)
        made = quantizing.swiglu_backward(g, u, d_h_NF)
        if made is not None:  # in one kernel
            return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", made)
        g_NF, u_NF = (quantizing.dequantize(each, dtype) for each in (g, u))
    silu_NF = F.silu(g_NF)
    d_u_NF = d_h_NF * silu_NF
    d_g_NF = torch.ops.aten.silu_backward(d_h_NF.mul_(u_NF), g_NF)
    return silu_NF.mul_(u_NF), d_g_NF, d_u_NF


def _quantize(backend: GEMMBackend, x_NF: torch.Tensor) -> SavedTensors | None:
    """Return ``x_NF`` quantized, if the backend stores it so."""
    return backend.quantize(x_NF) if isinstance(backend, QuantizedActivations) else None
