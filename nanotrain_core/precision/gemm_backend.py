"""The interface for the three GEMMs of a linear layer (forward, dgrad, wgrad), and plain PyTorch.

Shapes: M rows, K inputs, N outputs; for stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, cast

import torch

from nanotrain_core.moe.grouped_mm import (
    grouped_mm,
    grouped_mm_transposed,
    has_one_kernel,
    in_one_kernel,
    rows_times,
    transposed_in_one_kernel,
    transposed_times,
)
from nanotrain_core.pipeline.weight_gradients import WgradFn

#: What a backend saves of an input for wgrad.
SavedTensors = tuple[torch.Tensor, ...]


class GEMMBackend(Protocol):
    """Computes the three GEMMs of 2-D rows. Nothing here is differentiable: callers implement backward."""

    def forward(
        self, x_MK: torch.Tensor, *weights_NK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight [M, N], and what :meth:`wgrad` needs of x."""
        ...

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return what :meth:`wgrad` needs of x, when x was not saved but recomputed."""
        ...

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x [M, K]. Outside graphs the weight is the object given to ``forward``."""
        ...

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the gradient of the weight [N, K], in the weight's dtype or in float32.

        A run that accumulates gradients in float32 adds it unrounded; elsewhere autograd rounds it.
        """
        ...

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the backend for stacked weights [E, N, K]: rows are sorted, ``counts_E`` of them for each.

        A weight may have no rows, and there may be none at all.
        """
        ...


class QuantizedActivations:
    """An optional mixin of a :class:`GEMMBackend` that saves tensors for backward in quantized form.

    They are the activations from which x is recomputed, and output gradients that wait for a W pass.
    """

    def quantize(self, made_of_MK: torch.Tensor) -> SavedTensors | None:
        """Return the quantized form of ``made_of_MK`` to save for backward; None: save the tensor itself."""
        return None

    def dequantize(self, kept: SavedTensors, dtype: torch.dtype) -> torch.Tensor:
        """Return an approximation of the saved tensor."""
        raise NotImplementedError("quantize returned something, so its class must have dequantize as well")

    def swiglu(
        self, gate_MF: torch.Tensor, up_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, SavedTensors, SavedTensors] | None:
        """Return h = silu(gate) up in the form that ``forward`` reads, and gate and up as quantized.

        Override this and the next two methods if one kernel computes and quantizes them. None: there is no
        such kernel, and callers use separate operations. ``whole``: the result must also contain h itself.
        """
        return None

    def recompute_swiglu(
        self, gate: SavedTensors, up: SavedTensors, dtype: torch.dtype, *, whole: bool = False
    ) -> QuantizedInput | None:
        """Return h, from the saved gate and up, as ``save_for_wgrad`` reads it; None: see :meth:`swiglu`."""
        return None

    def swiglu_backward(
        self, gate: SavedTensors, up: SavedTensors, d_h_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, torch.Tensor, torch.Tensor] | None:
        """Return :meth:`recompute_swiglu`, and the gradients of gate and up; None: see :meth:`swiglu`."""
        return None

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> WgradFn:
        """Return a function that computes :meth:`wgrad` in a later W pass, with a bitwise equal result.

        Override it to hold the quantized form of dy instead of dy.
        """
        return partial(cast(GEMMBackend, self).wgrad, d_y_MN, kept)


@dataclass(frozen=True)
class QuantizedInput:
    """An input [M, K], quantized by the backend that reads it: x of ``forward`` and ``save_for_wgrad``."""

    forms: SavedTensors
    """The quantized input, in a form that only this backend reads."""
    shape: torch.Size
    dtype: torch.dtype
    whole: torch.Tensor | None = None
    """The input itself, where it exists."""

    @property
    def device(self) -> torch.device:
        """Return the device that it is on."""
        return self.forms[0].device


def as_quantized(x_MK: torch.Tensor, forms: SavedTensors) -> torch.Tensor:
    """Return ``x`` for a backend: a :class:`QuantizedInput` if it was quantized earlier (``forms`` is not
    empty)."""
    if not forms:
        return x_MK
    return cast(torch.Tensor, QuantizedInput(forms, x_MK.shape, x_MK.dtype, x_MK))


def deferred_wgrad(backend: GEMMBackend, d_y_MN: torch.Tensor, save: Callable[[], SavedTensors]) -> WgradFn:
    """Return the wgrad of a W pass, which holds as little until then as ``backend`` can.

    ``save`` returns what wgrad needs of x. It is called now for a backend that quantizes, so that only the
    quantized form is held; otherwise in the W pass, so that an x that is recomputed is not held until then.
    """
    if isinstance(backend, QuantizedActivations):
        return backend.defer_wgrad(d_y_MN, save())
    return lambda: backend.wgrad(d_y_MN, save())


class PreparesWeights:
    """Optional interface of a :class:`GEMMBackend` that prepares a form of each weight once per step.

    A compiled graph can hold no state between calls. The prepared form of a weight is therefore requested
    before the graph runs, passed to it, and ``forward`` and ``dgrad`` get a :class:`Prepared` for the weight.
    """

    def prepare(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the form that replaces the weight in GEMMs, computed once per ``Passes.weights_version``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Prepared:
    """A weight [N, K] or [E, N, K] in a compiled graph, for a backend that :class:`PreparesWeights`."""

    weight: torch.Tensor
    forms: SavedTensors

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the weight's dtype."""
        return self.weight.dtype


def as_prepared(weight: torch.Tensor, forms: SavedTensors) -> torch.Tensor:
    """Return ``weight`` in the form a backend receives: with its prepared form instead, if there is one."""
    return cast(torch.Tensor, Prepared(weight, forms)) if forms else weight


class TorchGEMM:
    """The three GEMMs in plain PyTorch. See :class:`GEMMBackend`."""

    def matmul(self, a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        """Return ``a_MK @ b_KN``; either may be a transposed view."""
        return a_MK @ b_KN

    def forward(
        self, x_MK: torch.Tensor, *weights_NK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and ``(x,)``: what :meth:`wgrad` needs."""
        return [self.matmul(x_MK, weight_NK.mT) for weight_NK in weights_NK], (x_MK,)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return ``(x,)``."""
        return (x_MK,)

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        return self.matmul(d_y_MN, weight_NK)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x."""
        return self.matmul(d_y_MN.T, kept[0])

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same backend for stacked weights."""
        return TorchGroupedGEMM(counts_E)


class TorchGroupedGEMM:
    """The GEMMs of stacked weights [E, N, K]. See :class:`GEMMBackend`.

    On a GPU in bfloat16 one kernel computes a whole GEMM, and the host does not wait for the counts.
    Elsewhere they are computed one after the other, in a compiled graph inside an operator, since it cannot
    know counts.
    """

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.counts_E = counts_E

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each weight."""
        return [int(count) for count in self.counts_E.tolist()]

    def forward(
        self, x_MK: torch.Tensor, *weights_ENK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return each weight's rows times its transpose, and ``(x,)``."""
        return [self._rows(x_MK, weight_ENK.mT) for weight_ENK in weights_ENK], (x_MK,)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return x."""
        return (x_MK,)

    def dgrad(self, d_y_MN: torch.Tensor, weight_ENK: torch.Tensor) -> torch.Tensor:
        """Return each weight's rows of dy times it."""
        return self._rows(d_y_MN, weight_ENK)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return each weight's rows of dy, transposed, times those of x; zero for no rows."""
        (x_MK,) = kept
        if has_one_kernel(d_y_MN, x_MK.shape[1]):
            return transposed_in_one_kernel(d_y_MN, x_MK, self.counts_E)
        if torch.compiler.is_compiling():
            d_weight_ENK: torch.Tensor = grouped_mm_transposed(d_y_MN, x_MK, self.counts_E)
            return d_weight_ENK
        return transposed_times(d_y_MN, x_MK, self.counts)

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same backend for other rows."""
        return TorchGroupedGEMM(counts_E)

    def _rows(self, rows: torch.Tensor, right_EAB: torch.Tensor) -> torch.Tensor:
        if has_one_kernel(rows, *right_EAB.shape[1:]):
            return in_one_kernel(rows, right_EAB, self.counts_E)
        if torch.compiler.is_compiling():
            y: torch.Tensor = grouped_mm(rows, right_EAB, self.counts_E)
            return y
        return rows_times(rows, right_EAB, self.counts)
