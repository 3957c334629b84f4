"""The interface of a precision, and of the master weights it creates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import GEMMBackend
from nanotrain_core.precision.quantized_storage import Packing


class MasterWeight:
    """A base class: the weight an optimizer updates, in whatever format a precision keeps it."""

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The master's own storage and the model weight that it is copied into; None: the master is encoded.

        Return them only if :meth:`load` always returns that storage and :meth:`store` only copies it into the
        weight, in the weight's dtype; the same tensor twice if the weight is its own master. The optimizer
        then updates the storage in place, copies many masters into their weights in one call, and does not
        call :meth:`load` or :meth:`store`. A class that overrides one of these must override this too.
        """
        return None

    def load(self) -> torch.Tensor:
        """Return the weight in the optimizer's dtype, in the parameter's shape.

        It may be the live storage. If it is decoded for this call, release it after ``store``: keeping it
        would use the memory that the format saves.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load()")

    def store(self, value: torch.Tensor) -> None:
        """Keep ``value`` as the new weight and write it through to the model's parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no store(value)")

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return live tensors beyond the parameter itself that a checkpoint must hold, by name.

        Each has the weight's shape, or is a scalar that is equal on all ranks with a piece of the parameter:
        a checkpoint keeps one value of it.
        """
        return {}


class ErrorFeedback(MasterWeight):
    """A master whose rounding error is so large that the optimizer must carry it in its momentum.

    After each ``store(value)`` the optimizer adds what ``error`` returns to its momentum, scaled so that the
    following steps compensate for it. An optimizer that cannot must reject such a master in ``setup``.
    """

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, just stored, minus the value that was kept."""
        raise NotImplementedError(f"{type(self).__name__} has no error(value)")


class LossScale(Protocol):
    """Multiplies the loss before backward so that small gradients survive a low-precision dtype."""

    @property
    def value(self) -> float:
        """The factor, above 0."""
        ...

    def update(self, skipped: bool | torch.Tensor) -> None:
        """Update the scale after a step.

        ``skipped``: a bool, or a scalar bool tensor on the device; reading it synchronizes.
        """
        ...

    def meta(self) -> dict[str, Any]:
        """Return the state as JSON, the same on every rank."""
        ...

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`meta` returned."""
        ...


class Precision:
    """A base class for the dtypes of a run. Override :meth:`convert` and :meth:`master`; the other methods do
    nothing by default."""

    parameter_dtype: torch.dtype
    """Dtype of the model's parameters and activations."""
    gradient_dtype: torch.dtype | None
    """Dtype of accumulated and reduced gradients; None keeps the parameter's dtype."""
    loss_scale: LossScale

    def setup(self, seed: int, passes: Passes, gemm: GEMMBackend) -> None:
        """Receive what the precision needs of the run, before any other call.

        Args:
            seed: of the run: a precision with stochastic rounding rounds identically in two runs of the same
                seed.
            passes: for layers that must query the current pass.
            gemm: the fastest GEMM backend on this device in the inputs' dtype: for a precision that only
                changes how weights are stored.
        """

    def convert(self, part: nn.Module) -> nn.Module:
        """Return the part, still on ``meta``, with the dtypes and modules of this precision.

        Parameters keep their names and shapes. Their initial values, drawn in float32, are then
        rounded into the dtypes chosen here.
        """
        raise NotImplementedError(f"{type(self).__name__} has no convert(part)")

    def check_parts(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Inspect all parts, once on every rank after they are converted.

        It may communicate, to find out whether a pattern of the recipe matches any module of the model.
        """

    def packing(self, name: str, parameter: nn.Parameter) -> Packing | None:
        """Return the format in which a parameter is stored packed, or None: it is stored as it is.

        Called for each parameter of this rank, still on ``meta``, before wrappers shard it. Those that are
        packed become a :class:`~nanotrain_core.precision.quantized_storage.PackedWeight`, and are allocated
        packed; one at a time then gets its values, unpacked, and is packed. In :meth:`convert`, give their
        layers a
        :class:`~nanotrain_core.precision.dequantizing_gemm.DequantizingGEMM`.
        """
        return None

    def describe(self) -> Sequence[str]:
        """Return lines for the console that describe each module's precision, the same on every rank."""
        return ()

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the master of ``weight``: a parameter, or a live view of a range of one.

        It may round ``weight`` in place. All ranks that hold the same weight round it alike, or receive the
        rounded values by all-gather.

        Args:
            weight: initialized; the master's ``store`` writes through to it. The weight of ``piece``, or a
                copy of it on another device.
            piece: its name and its position in the whole model. A range begins and ends at a multiple of
                :data:`~nanotrain_core.layout.placement.RANGE` elements of its block, or at the block's end.
        """
        raise NotImplementedError(f"{type(self).__name__} has no master(weight, piece)")
