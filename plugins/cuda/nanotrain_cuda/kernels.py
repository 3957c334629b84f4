"""The ``cuda`` kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import Kernels, Ops, Passes, counting_routers, plain_ops
from nanotrain_cuda import CUDAKernelsConfig, adamw
from nanotrain_cuda.permutation import permute, unpermute
from nanotrain_cuda.top_k import choose_experts
from nanotrain_cuda.without_rows import experts


class CUDAKernels(Kernels):
    """See :class:`~nanotrain_core.contracts.Kernels`."""

    def __init__(self, config: CUDAKernelsConfig) -> None:
        self.config = config

    def ops(self, device: torch.device) -> Ops:
        """Return PyTorch's functions; what experts need beside products is Triton's on a GPU.

        Raises:
            NanotrainError: on a GPU without Triton.
        """
        if device.type == "cuda" and not find_spec("triton"):
            raise NanotrainError(
                "kernels 'cuda': triton is not installed; pip install triton, or [kernels] use = 'torch'"
            )
        return replace(plain_ops(device), permute=permute, unpermute=unpermute, experts=experts)

    def apply(self, part: nn.Module, passes: Passes) -> None:
        """Make routers choose experts in one kernel: on a GPU, and elsewhere by plain PyTorch."""
        for router in counting_routers([part]).values():
            router.choose = choose_experts

    def low_precision_adamw(
        self,
        weights: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        group: Mapping[str, Any],
        found_inf: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Update float32 weights on a GPU, each in one kernel; return all others."""
        return adamw.low_precision_adamw(weights, states, group, found_inf)
