"""What kernels must offer: who computes a model's functions and linear layers, and how ranks exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.ops import TORCH, Ops
from nanotrain_core.precision.gemm import GEMMBackend, TorchGEMM

if TYPE_CHECKING:
    from nanotrain_core.pipeline.passes import Passes


class Kernels:
    """A base class whose methods do what plain PyTorch does: override those that you have something for.

    A component announces the device that it is made for with ``provides={"kernels:cpu"}`` (or ``cuda``):
    ``[kernels] use = "auto"`` then takes it where it is installed.
    """

    def prepare(self, device: torch.device) -> None:
        """Set up this process before anything of the run exists, for example its memory allocator."""

    def ops(self, device: torch.device) -> Ops:
        """Return the functions that the model calls: :class:`~nanotrain_core.models.ops.Ops`, some replaced.

        Each must have the values and gradients of its namesake in
        :data:`~nanotrain_core.models.ops.TORCH`, to the rounding of the tensors' dtype.
        """
        return TORCH

    def gemm(self) -> GEMMBackend:
        """Return who makes forward, dgrad and wgrad of a linear layer where these are needed apart."""
        return TorchGEMM()

    def apply(self, part: nn.Module, passes: Passes) -> None:
        """Change how modules of ``part`` compute, by role, once precision and wrappers are done.

        Parameters keep their names, shapes and objects. Called while they are still on ``meta``.

        Args:
            part: one of this rank's stages.
            passes: what the modules may ask about the pass that they are in.
        """

    def transport(self) -> Transport:
        """Return how ranks exchange tensors: process groups, or something faster where it can be had."""
        return Transport()
