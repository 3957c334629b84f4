"""The interface of kernels: implementations of a model's functions and linear layers, and the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.gpu_ops import plain_ops
from nanotrain_core.models.ops import Ops
from nanotrain_core.precision.gemm import GEMMBackend, TorchGEMM

if TYPE_CHECKING:
    from nanotrain_core.pipeline.passes import Passes


class Kernels:
    """A base class whose methods do what plain PyTorch does: override those for which you have kernels.

    A component declares the device that it supports with ``provides={"kernels:cpu"}`` (or ``cuda``):
    ``[kernels] use = "auto"`` then selects it where it is installed.
    """

    def prepare(self, device: torch.device) -> None:
        """Set up this process before any object of the run exists, for example its memory allocator."""

    def ops(self, device: torch.device) -> Ops:
        """Return the functions that the model calls: :class:`~nanotrain_core.models.ops.Ops`, some replaced.

        Each must have the values and gradients of the function of the same name in
        :data:`~nanotrain_core.models.ops.TORCH_OPS`, to the rounding of the tensors' dtype.
        """
        return plain_ops(device)

    def gemm(self) -> GEMMBackend:
        """Return the GEMM backend for a linear layer whose forward, dgrad and wgrad run separately."""
        return TorchGEMM()

    def apply(self, part: nn.Module, passes: Passes) -> None:
        """Change how modules of ``part`` compute, by role, after precision and wrappers have been applied.

        Parameters keep their names, shapes and objects. Called while they are still on ``meta``.

        Args:
            part: one of this rank's stages.
            passes: what the modules may query about the current pass.
        """

    def low_precision_adamw(
        self,
        weights: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        group: Mapping[str, Any],
        found_inf: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Take a step of AdamW on those weights for which there is a kernel, in place; return all others.

        By default there is none. A kernel computes what plain PyTorch computes for weights that are returned,
        to the rounding of float32: see :class:`~nanotrain_core.optim.moments.LowPrecisionAdamW`.

        Args:
            weights: of one group, perhaps none; each has a ``grad``.
            states: of each weight ``step``, and its moments ``exp_avg`` and ``exp_avg_sq``: a tensor of that
                name, or codes and scales under that name with ``_code`` and ``_scale``.
            group: the weights' group of ``param_groups``.
            found_inf: a float32 scalar on the device; if it is 1, nothing may change.
        """
        return list(weights)

    def transport(self) -> Transport:
        """Return how ranks communicate: process groups, or a faster transport where one is available."""
        return Transport()
