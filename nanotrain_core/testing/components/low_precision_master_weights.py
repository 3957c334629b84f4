"""The implementation of ``coarse``."""

from __future__ import annotations

import torch

from nanotrain_core.contracts import ErrorFeedback, MasterWeight
from nanotrain_core.layout.placement import Piece
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Uniform


class LoadedMaster(MasterWeight):
    """Keeps a weight exactly, but is not plain: it is loaded for every update, and stored."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def load(self) -> torch.Tensor:
        """Return a copy, as a master that decodes does."""
        return self.weight.clone()

    def store(self, value: torch.Tensor) -> None:
        """Copy it."""
        self.weight.copy_(value)


class CoarseMaster(LoadedMaster, ErrorFeedback):
    """Rounds to multiples of a step, and reports the error: see ``ErrorFeedback`` of the contracts."""

    def __init__(self, weight: torch.Tensor, step: float) -> None:
        super().__init__(weight)
        self.step = step
        self.store(weight.clone())

    def store(self, value: torch.Tensor) -> None:
        """Round to nearest."""
        self.weight.copy_((value / self.step).round() * self.step)

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rounding error."""
        return value - self.weight


class Coarse(Uniform):
    """float64 with coarse masters."""

    def __init__(self, step: float) -> None:
        super().__init__(torch.float64, NoLossScale())
        self.step = step

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Round the weight immediately."""
        return CoarseMaster(weight, self.step) if self.step else LoadedMaster(weight)
