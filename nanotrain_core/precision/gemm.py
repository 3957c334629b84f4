"""Separate forward, dgrad and wgrad of a linear layer, for code that ``nn.Linear`` cannot serve.

A precision (FP8, quantized storage), a schedule with W passes, tensor parallelism that overlaps communication
and CPU kernels all set a :class:`GEMMBackend` on layers when a run is composed, with :func:`use_gemm`. It
runs inside all hooks of the layer. Otherwise ``nn.Linear`` itself runs, and the experts' function
of the model's :class:`~nanotrain_core.models.ops.Ops`.

Shapes: M rows, K inputs, N outputs; for stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.roles import Role, overridden_by, override_forward, tag_of
from nanotrain_core.moe.expert_gemms import use_expert_gemms
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm_backend import (
    GEMMBackend,
    Prepared,
    PreparesWeights,
    QuantizedActivations,
    QuantizedInput,
    SavedTensors,
    TorchGEMM,
    as_prepared,
    as_quantized,
    deferred_wgrad,
)
from nanotrain_core.precision.wgrad_carrier import wgrad_carrier
from nanotrain_core.precision.wgrad_point import WgradPoint

__all__ = [
    "GEMMBackend",
    "LinearGEMMs",
    "Prepared",
    "PreparesWeights",
    "QuantizedActivations",
    "QuantizedInput",
    "Recomputed",
    "SavedTensors",
    "TorchGEMM",
    "gemm_parameters",
    "gemms_of",
    "prepare_weights",
    "use_gemm",
]

#: Roles of layers that compute ``x @ weight.T + bias`` and nothing else.
LINEAR_ROLES = frozenset({Role.COLUMN, Role.ROW, Role.REPLICATED})


class Offer(NamedTuple):
    """How to recompute a linear layer's input in backward."""

    of: SavedTensors
    """The tensors to save instead of the input."""
    make: Callable[..., torch.Tensor]
    """``make(*of)`` returns the input, or its :class:`QuantizedInput`. Not differentiable."""
    forms: SavedTensors
    """Quantized tensors that forward reads instead of the input; empty: it reads the input."""


class Recomputed:
    """The input of a linear layer that is recomputed in the backward pass, and so need not be saved.

    The code that computes the input offers to recompute it. A layer whose input has no offer saves the input.
    An unused offer, as in a recomputation that ends early, is released with its tensor.
    """

    def __init__(self) -> None:
        self._offers = WeakTensorKeyDictionary()
        self._traced: tuple[torch.Tensor, Offer] | None = None
        """The offer in a graph, which supports neither weak references nor tensor versions."""

    def offer(
        self, x: torch.Tensor, of: SavedTensors, make: Callable[..., torch.Tensor], forms: SavedTensors = ()
    ) -> None:
        """Offer to recompute ``x``, in its current version, as ``make(*of)``; see :class:`Offer`."""
        if torch.compiler.is_compiling():
            self._traced = x, Offer(of, make, forms)
        else:
            self._offers[x] = x._version, Offer(of, make, forms)

    def take(self, x: torch.Tensor) -> Offer | None:
        """Return and remove the offer for ``x``, if ``x`` is unchanged."""
        if torch.compiler.is_compiling():
            traced, self._traced = self._traced, None
            return traced[1] if traced is not None and traced[0] is x else None
        version, found = self._offers.pop(x, (None, None))  # type: ignore[no-untyped-call]
        return found if version == x._version else None


class LinearGEMMs:
    """The GEMM backends of a module, used instead of its own computation."""

    def __init__(self, backends: Mapping[str, GEMMBackend], passes: Passes) -> None:
        self.backends = dict(backends)
        """The backend of each parameter. Parameters with the same backend object share the quantized form of
        their input. Read in every call, so a monitor can replace entries by wrappers."""
        self.passes = passes
        self.wgrad_point: WgradPoint | None = None
        """Where the next call's wgrad is computed: tensor parallelism sets it, the call removes it."""
        self.recomputed = Recomputed()
        self.prepared: dict[str, SavedTensors] = {}
        """By parameter: the form that a compiled graph reads instead of it, see :func:`prepare_weights`."""
        self.carriers: dict[str, torch.Tensor | None] = {}
        """By parameter: the tensor to which a graph returns its wgrad, see :func:`wgrad_carrier`."""

    def prepare(self, module: nn.Module) -> None:
        """Prepare the operands of a graph's next call, and the receivers of its wgrads."""
        for name, backend in self.backends.items():
            weight = module.get_parameter(name)
            if isinstance(backend, PreparesWeights):
                self.prepared[name] = backend.prepare(weight)
            self.carriers[name] = wgrad_carrier(weight)

    def take_wgrad_point(self) -> WgradPoint | None:
        """Return the wgrad point of this call."""
        point, self.wgrad_point = self.wgrad_point, None
        return point


_ATTRIBUTE = "nanotrain_gemms"


def gemm_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of ``module`` whose GEMMs can use a backend: see :func:`use_gemm`.

    None of a subclass of ``nn.Linear`` with a forward of its own, which may compute more than the product, as
    a scaled output: a backend replaces the forward. Nor of a layer that a wrapper has taken over.
    """
    found = tag_of(module)
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    own |= overridden_by(module) not in (None, _forward)
    if found is None or (own and found.role in LINEAR_ROLES):
        return ()  # a wrapper computes on other rows than the module receives
    return ("weight",) if found.role in LINEAR_ROLES else tuple(found.gemm_weights)


def use_gemm(module: nn.Module, backends: Mapping[str, GEMMBackend], passes: Passes) -> None:
    """Make ``module`` compute the GEMMs of its parameters with ``backends``, inside all its hooks.

    Args:
        module: a linear layer, or SwiGLU EXPERTS whose tag names ``gemm_weights``.
        backends: for each name in :func:`gemm_parameters`.
        passes: of the run.

    Raises:
        PluginError: a backend is for a parameter that is not among those.
    """
    if more := {*backends} - {*gemm_parameters(module)}:
        text = f"{type(module).__name__}.{min(more)} takes no GEMM backend: expected gemm_parameters(module)"
        raise PluginError(text)
    gemms = LinearGEMMs(backends, passes)
    setattr(module, _ATTRIBUTE, gemms)
    found = tag_of(module)
    if backends and found is not None:
        if found.role in LINEAR_ROLES:
            override_forward(module, _forward)
        else:
            use_expert_gemms(module, gemms.backends, gemms.prepared, gemms.carriers, passes)


def gemms_of(module: nn.Module) -> LinearGEMMs | None:
    """Return the backends that :func:`use_gemm` set on ``module``; None: it uses its own computation."""
    return getattr(module, _ATTRIBUTE, None)


def prepare_weights(modules: Iterable[nn.Module]) -> None:
    """Prepare the forms that compiled layers read instead of their weights, if the previous ones are invalid.

    Also create the tensors to which a graph returns these weights' gradients, if those have higher precision.

    Call it before each call of the layers' graph, outside the graph.
    """
    for module in modules:
        gemms = gemms_of(module)
        if gemms is not None:
            gemms.prepare(module)


def _forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replaces a linear layer's forward; a hook may have removed its bias."""
    gemms = gemms_of(module)
    assert gemms is not None
    point = gemms.take_wgrad_point()
    offer, handle = gemms.recomputed.take(x), None if point is None else point.handle
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    compiling = torch.compiler.is_compiling()
    forms = gemms.prepared.get("weight", ()) if compiling else ()
    carrier = gemms.carriers.get("weight") if compiling else None
    weight = weight if carrier is None else weight.detach()
    of, make, read = offer or ((), None, ())
    y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, carrier, gemms, make, (len(of), len(read)), point, handle, *of, *read, *forms
    )
    return y if module.bias is None else y + module.bias  # type: ignore[operator]


class _Linear(torch.autograd.Function):
    """y = x W^T. Backward: dgrad now; wgrad now, or in a W pass or at its point."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        carrier_NK: torch.Tensor | None,
        gemms: LinearGEMMs,
        make: Callable[..., torch.Tensor] | None,
        counts: tuple[int, int],
        point: WgradPoint | None,
        handle: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        backend, (made_of, read) = gemms.backends["weight"], counts
        of, forms = tensors[:made_of], tensors[made_of + read :]
        x_MK = as_quantized(x.reshape(-1, x.shape[-1]), tensors[made_of : made_of + read])
        (y_MN,), kept = backend.forward(x_MK, as_prepared(weight_NK, forms))
        ctx.backend, ctx.passes, ctx.shape, ctx.point = backend, gemms.passes, x.shape, point
        ctx.make, ctx.forms, ctx.tensors = make, len(forms), len(tensors)
        # Activation checkpointing saves a detached copy, but gradient hooks are on the parameter itself,
        # and a backend that caches a form of a weight identifies the weight by its parameter.
        ctx.parameter = None if torch.compiler.is_compiling() else weight_NK
        share, ctx.recompute = (point and point.recompute) or (None, None)
        frozen = not any(ctx.needs_input_grad[1:3])  # then nothing reads the input again
        saved = () if frozen else (share,) if share is not None else of if make is not None else kept
        ctx.save_for_backward(weight_NK, *forms, *saved)
        return y_MN.view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_NK, *saved = ctx.saved_tensors
        forms, kept = tuple(saved[: ctx.forms]), saved[ctx.forms :]
        backend, d_y_MN, d_x, d_weight_NK = ctx.backend, d_y.reshape(-1, d_y.shape[-1]), None, None
        # Compared with None: torch 2.11 compiles no condition on a method.
        make: Callable[[], torch.Tensor] | None = None if ctx.make is None else partial(ctx.make, *kept)
        to_weight, to_carrier = ctx.needs_input_grad[1:3]
        needed = to_weight or to_carrier
        if needed and ctx.recompute is not None:  # begins now and overlaps dgrad
            make = ctx.recompute(kept[0])

        def save() -> SavedTensors:
            if make is None:
                return tuple(kept)
            x = make()
            rows = x if isinstance(x, QuantizedInput) else x.reshape(-1, ctx.shape[-1])
            again: SavedTensors = backend.save_for_wgrad(rows)
            return again

        def wgrad() -> torch.Tensor:
            d_weight: torch.Tensor = backend.wgrad(d_y_MN, save())
            return d_weight

        parameter = weight_NK if ctx.parameter is None else ctx.parameter
        if ctx.needs_input_grad[0]:
            d_x = backend.dgrad(d_y_MN, as_prepared(parameter, forms)).view(ctx.shape)
        if needed:
            if ctx.point is not None and not ctx.passes.defers(parameter):
                ctx.point.left.append(wgrad)
            else:
                defer = partial(deferred_wgrad, backend, d_y_MN, save)
                d_weight_NK = ctx.passes.weight_gradient(parameter, wgrad, defer)
        carried, own = (d_weight_NK, None) if to_carrier else (None, d_weight_NK)
        return d_x, own, carried, *(None,) * (5 + ctx.tensors)
