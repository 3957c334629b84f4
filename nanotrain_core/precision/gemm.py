"""A linear layer's forward, dgrad and wgrad, apart: for whoever needs more than ``nn.Linear``.

A precision (FP8, quantized storage), a schedule with W passes, tensor parallelism that overlaps communication
and CPU kernels all put a :class:`GEMMBackend` behind layers when a run is composed, with :func:`use_gemm`. It
runs inside all hooks of the layer. Where nobody does, ``nn.Linear`` itself runs, and the experts' function
of the model's :class:`~nanotrain_core.models.ops.Ops`.

Shapes: M rows, K inputs, N outputs; of stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import Role, tag_of, take_over, taken_over_by
from nanotrain_core.moe.grouped_mm import grouped_mm, grouped_mm_transposed
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.placed_wgrad import Place

#: Roles of layers that are ``x @ weight.T + bias`` and nothing else.
LINEAR = frozenset({Role.COLUMN, Role.ROW, Role.REPLICATED})

#: What a backend keeps of an input for wgrad.
Kept = tuple[torch.Tensor, ...]


class GEMMBackend(Protocol):
    """Makes the three products of 2-D rows. Nothing here is differentiable: callers have their own backward."""

    def forward(self, x_MK: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return x times each transposed weight [M, N], and what of x :meth:`wgrad` needs."""
        ...

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return what :meth:`wgrad` needs of x, which was not kept but recomputed."""
        ...

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x [M, K]."""
        ...

    def wgrad(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return the gradient of the weight [N, K], in the weight's dtype or in float32.

        A run that adds gradients up in float32 adds it as it is; elsewhere autograd rounds it.
        """
        ...

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights [E, N, K]: rows are sorted, ``counts_E`` of them for each.

        A weight may have no rows, and there may be none at all.
        """
        ...


class QuantizedActivations:
    """What a :class:`GEMMBackend` may be as well: able to hold what x is made of in fewer bits."""

    def quantize(self, made_of_MK: torch.Tensor) -> Kept | None:
        """Return what to keep for the backward pass in its place; None: it as it is."""
        return None

    def dequantize(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return about what was kept."""
        raise NotImplementedError("quantize returned something, so its class must have dequantize as well")


class TorchGEMM:
    """Plain PyTorch. See :class:`GEMMBackend`."""

    def matmul(self, a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        """Return ``a_MK @ b_KN``; either may be a transposed view."""
        return a_MK @ b_KN

    def forward(self, x_MK: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return x times each transposed weight, and x."""
        return [self.matmul(x_MK, weight_NK.mT) for weight_NK in weights_NK], (x_MK,)

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return x."""
        return (x_MK,)

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        return self.matmul(d_y_MN, weight_NK)

    def wgrad(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return the transposed dy times x."""
        return self.matmul(d_y_MN.T, kept[0])

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights."""
        return TorchGroupedGEMM(counts_E)


class TorchGroupedGEMM:
    """The products of stacked weights [E, N, K], one after the other. See :class:`GEMMBackend`."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.counts_E = counts_E
        self.counts: list[int] | None = None
        """How many rows each weight has; None in a compiled graph, which cannot know."""
        if not torch.compiler.is_compiling():
            self.counts = counts_E.tolist()

    def forward(self, x_MK: torch.Tensor, *weights_ENK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return each weight's rows times its transpose, and x."""
        return [self._rows(x_MK, weight_ENK.mT) for weight_ENK in weights_ENK], (x_MK,)

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return x."""
        return (x_MK,)

    def dgrad(self, d_y_MN: torch.Tensor, weight_ENK: torch.Tensor) -> torch.Tensor:
        """Return each weight's rows of dy times it."""
        return self._rows(d_y_MN, weight_ENK)

    def wgrad(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return each weight's rows of dy, transposed, times those of x; zero where there are none."""
        if self.counts is None:
            d_weight_ENK: torch.Tensor = grouped_mm_transposed(d_y_MN, kept[0], self.counts_E)
            return d_weight_ENK
        pairs = zip(torch.split(d_y_MN, self.counts), torch.split(kept[0], self.counts), strict=True)
        return torch.stack([d_y.T @ x for d_y, x in pairs])

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for other rows."""
        return TorchGroupedGEMM(counts_E)

    def _rows(self, rows: torch.Tensor, right_EAB: torch.Tensor) -> torch.Tensor:
        if self.counts is None:
            y: torch.Tensor = grouped_mm(rows, right_EAB, self.counts_E)
            return y
        pairs = zip(torch.split(rows, self.counts), right_EAB, strict=True)
        return torch.cat([own @ right_AB for own, right_AB in pairs])


class Recomputed:
    """The input of a linear layer that is made anew in the backward pass, and so need not be kept.

    Who makes it offers it to the layer that reads it; a layer that gets another tensor keeps that.
    """

    def __init__(self) -> None:
        self._x: torch.Tensor | None = None

    def offer(self, x: torch.Tensor, of: Kept, make: Callable[..., torch.Tensor]) -> None:
        """Say that ``x``, as it is now, is ``make(*of)``, which is not differentiable."""
        self._x, self._version, self._how = x, x._version, (of, make)

    def take(self, x: torch.Tensor) -> tuple[Kept, Callable[..., torch.Tensor]] | None:
        """Return what was offered for ``x``, if it is unchanged, and forget it."""
        same = x is self._x and x._version == self._version
        self._x = None
        return self._how if same else None


class LinearGEMMs:
    """What a module computes its products with, in place of its own."""

    def __init__(self, backends: Mapping[str, GEMMBackend], passes: Passes) -> None:
        self.backends = dict(backends)
        """By parameter. Those with one object share their input's form."""
        self.passes = passes
        self.place: Place | None = None
        """Where the next call leaves its wgrad: tensor parallelism sets it, the call takes it."""
        self.recomputed = Recomputed()

    def take_place(self) -> Place | None:
        """Return the place for this call."""
        place, self.place = self.place, None
        return place


_ATTRIBUTE = "nanotrain_gemms"


def gemm_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of ``module`` whose products can be made elsewhere: see :func:`use_gemm`."""
    found = tag_of(module)
    if found is None or (found.role in LINEAR and taken_over_by(module) not in (None, _forward)):
        return ()  # a wrapper computes on other rows than it is called with
    return ("weight",) if found.role in LINEAR else tuple(found.products)


def use_gemm(module: nn.Module, backends: Mapping[str, GEMMBackend], passes: Passes) -> None:
    """Have ``module`` make the products of its parameters with ``backends``, inside all its hooks.

    Args:
        module: a linear layer of any class, or SwiGLU EXPERTS whose tag names ``products``.
        backends: for each name in :func:`gemm_parameters`.
        passes: of the run.
    """
    from nanotrain_core.moe.expert_gemms import use_expert_gemms

    gemms = LinearGEMMs(backends, passes)
    setattr(module, _ATTRIBUTE, gemms)
    found = tag_of(module)
    if backends and found is not None:
        if found.role in LINEAR:
            take_over(module, _forward)
        else:
            use_expert_gemms(module, gemms)


def gemms_of(module: nn.Module) -> LinearGEMMs | None:
    """Return what :func:`use_gemm` gave ``module``; None: it computes by itself."""
    return getattr(module, _ATTRIBUTE, None)


def _forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run in a linear layer's place; a hook may have taken its bias out."""
    gemms = gemms_of(module)
    assert gemms is not None
    place, recomputed = gemms.take_place(), gemms.recomputed.take(x)
    handle = None if place is None else place.handle
    y: torch.Tensor = _Linear.apply(x, module.weight, gemms, recomputed, place, handle)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias  # type: ignore[operator]


class _Linear(torch.autograd.Function):
    """y = x W^T. Backward: dgrad now, wgrad now or when the pass, or the place, has it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        gemms: LinearGEMMs,
        recomputed: tuple[Kept, Callable[..., torch.Tensor]] | None,
        place: Place | None,
        handle: torch.Tensor | None,
    ) -> torch.Tensor:
        backend = gemms.backends["weight"]
        (y_MN,), kept = backend.forward(x.reshape(-1, x.shape[-1]), weight_NK)
        ctx.backend, ctx.passes, ctx.shape, ctx.place = backend, gemms.passes, x.shape, place
        ctx.again = place and place.again
        ctx.make = recomputed[1] if recomputed else None
        ctx.save_for_backward(
            weight_NK, *((ctx.again[0],) if ctx.again else recomputed[0] if recomputed else kept)
        )
        return y_MN.view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_NK, *kept = ctx.saved_tensors
        backend, d_y_MN, d_x, d_weight_NK = ctx.backend, d_y.reshape(-1, d_y.shape[-1]), None, None
        make: Callable[[], torch.Tensor] | None = ctx.make and partial(ctx.make, *kept)
        if ctx.needs_input_grad[1] and ctx.again:  # begins now, while dgrad is made
            make = ctx.again[1](kept[0])

        def wgrad() -> torch.Tensor:
            of_x = tuple(kept) if make is None else backend.keep(make().reshape(-1, ctx.shape[-1]))
            d_weight: torch.Tensor = backend.wgrad(d_y_MN, of_x)
            return d_weight

        if ctx.needs_input_grad[0]:
            d_x = backend.dgrad(d_y_MN, weight_NK).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if ctx.place is not None and not ctx.passes.defers(weight_NK):
                ctx.place.left.append(wgrad)
            else:
                d_weight_NK = ctx.passes.weight_gradient(weight_NK, wgrad)
        return d_x, d_weight_NK, None, None, None, None
