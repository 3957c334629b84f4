"""Master weights in host memory: the optimizer works there and copies new weights to the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanotrain_core.api.torch import ErrorFeedback, MasterWeight, Piece, Precision, unquantized


class HostMaster(MasterWeight):
    """A precision's master of a copy on the host. See :class:`~nanotrain_core.contracts.MasterWeight`."""

    def __init__(self, weight: torch.Tensor, host: torch.Tensor, inner: MasterWeight) -> None:
        """``inner`` is the master of ``host``, a copy of the device's ``weight``."""
        self.weight, self.host, self.inner = weight, host, inner

    @classmethod
    def of(cls, piece: Piece, precision: Precision) -> HostMaster:
        """Copy the weight of ``piece`` to pinned memory, from which a GPU copies asynchronously."""
        weight = piece.weight
        host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
        host.copy_(unquantized(weight))
        inner = precision.master(host, piece)
        weight.copy_(host)  # as rounded by the master
        kind = LossyHostMaster if isinstance(inner, ErrorFeedback) else cls
        return kind(weight, host, inner)

    def load(self) -> torch.Tensor:
        """Return the weight, on the host."""
        return self.inner.load()

    def store(self, value: torch.Tensor) -> None:
        """Store ``value`` and copy the rounded weight to the device."""
        self.inner.store(value)
        self.weight.copy_(self.host, non_blocking=True)

    def refresh(self) -> None:
        """Update the master from a weight that a checkpoint was read into on the device."""
        self.host.copy_(self.weight)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the precision's state beyond the weight."""
        return self.inner.state()


class LossyHostMaster(HostMaster, ErrorFeedback):
    """The same for a master whose rounding error the optimizer carries."""

    inner: ErrorFeedback

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rounding error of ``value``, on the host."""
        return self.inner.error(value)
