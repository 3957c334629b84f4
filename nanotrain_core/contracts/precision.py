"""What a precision must offer, and the master weights it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import GEMMBackend


class MasterWeight:
    """A base class: the weight an optimizer updates, in whatever form a precision keeps it."""

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The master's own storage and the weight of the model it is copied into; None: it is encoded.

        Not None only if :meth:`load` always returns that storage, and :meth:`store` of it does nothing but
        copy it into the weight, in the weight's dtype; the same tensor twice if the weight is its own master.
        An optimizer then updates the storage in place and copies many into their weights in one call, and
        :meth:`load` and :meth:`store` are not called. Who overrides :meth:`load` or
        :meth:`store` overrides this too.
        """
        return None

    def load(self) -> torch.Tensor:
        """Return the weight in the optimizer's dtype, shaped as the parameter.

        May be the live storage. If it is decoded for this call, forget it after ``store``: kept, it would
        cost the memory that the format saves.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load()")

    def store(self, value: torch.Tensor) -> None:
        """Keep ``value`` as the new weight and write it through to the model's parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no store(value)")

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return live tensors beyond the parameter itself that a checkpoint must hold, by name.

        Each is shaped as the weight, or is a scalar.
        """
        return {}


class ErrorFeedback(MasterWeight):
    """A master that loses so much of what is stored that the optimizer must carry the loss in its momentum.

    After each ``store(value)`` the optimizer adds what ``error`` returns to its momentum, scaled so that the
    steps to come make up for it. One that cannot must refuse such a master in ``setup``.
    """

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, just stored, less what was kept of it."""
        raise NotImplementedError(f"{type(self).__name__} has no error(value)")


class LossScale(Protocol):
    """Multiplies the loss before backward so that small gradients survive a low-precision dtype."""

    @property
    def value(self) -> float: ...

    def update(self, skipped: bool | torch.Tensor) -> None:
        """Learn whether the step was skipped: a bool, or one on the device, which costs a wait to read."""
        ...

    def meta(self) -> dict[str, Any]: ...

    def load_meta(self, meta: Mapping[str, Any]) -> None: ...


class Precision:
    """Dtypes of a run: a base class, whose methods do nothing unless it is said what they must do."""

    parameter_dtype: torch.dtype
    """Of the model's parameters and activations."""
    gradient_dtype: torch.dtype | None
    """Of accumulated and reduced gradients; None keeps the parameter's."""
    loss_scale: LossScale

    def setup(self, seed: int, passes: Passes, gemm: GEMMBackend) -> None:
        """Learn of the run, before anything else.

        Args:
            seed: of the run: a precision that rounds at random rounds alike in two runs.
            passes: for layers that must know about the pass that they are in.
            gemm: who multiplies in the dtype of what comes in, fastest on this device: for a precision that
                only changes how weights are held.
        """

    def convert(self, part: nn.Module) -> nn.Module:
        """Return the part, still on ``meta``, with the dtypes and modules of this precision.

        Parameters keep their names and shapes. Their initial values, drawn in float32, are then
        rounded into the dtypes chosen here.
        """
        raise NotImplementedError(f"{type(self).__name__} has no convert(part)")

    def settle(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Look at all parts, once on every rank when they are converted.

        It may talk to other ranks, to learn whether a pattern of the recipe matches any module of the model.
        """

    def pack(self, parts: Sequence[nn.Module]) -> None:
        """Quantize weights, once on every rank when they are initialised, loaded and equal on all replicas.

        It may replace parameters by ones of the same names and shapes which take less memory, each a
        :class:`~nanotrain_core.precision.quantized_storage.PackedWeight`. Give their layers a
        :class:`~nanotrain_core.precision.dequantizing_gemm.DequantizingGEMM`, in :meth:`convert`.
        """

    def describe(self) -> Sequence[str]:
        """Return lines that say what each module got, the same on every rank. The console shows them."""
        return ()

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the master of ``weight``: a parameter, or a live view of a range of one.

        It may round ``weight`` into its format at once: ranks that hold it do the same, or are sent it.

        Args:
            weight: initialised; the master's ``store`` writes through to it. The weight of ``piece``, or a
                copy of it on another device.
            piece: its name, and where it sits in the whole model. A range begins and ends at a multiple of
                :data:`~nanotrain_core.layout.placement.RANGE` elements of its block, or at the block's end.
        """
        raise NotImplementedError(f"{type(self).__name__} has no master(weight, piece)")
