"""The ``cpu`` kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nanotrain_core.api.torch import (
    TORCH_OPS,
    Chunks,
    GEMMBackend,
    Kernels,
    Ops,
    Passes,
    Transport,
    linear_cross_entropy,
)
from nanotrain_cpu import CPUKernelsConfig
from nanotrain_cpu.attention import attention
from nanotrain_cpu.elementwise import rms_norm, rope
from nanotrain_cpu.experts import experts
from nanotrain_cpu.gemm import CPUGEMM, use_faster_products
from nanotrain_cpu.matmul import matmul_of_loss
from nanotrain_cpu.memory import keep_freed_memory
from nanotrain_cpu.transport import SharedMemoryTransport

#: Logits that stay in the processor's cache from one pass over them to the next.
IN_CACHE = Chunks(logits=2**20, tokens=256)

#: Functions that make a training step on a CPU faster than plain PyTorch: the README has measurements.
FASTER = replace(
    TORCH_OPS,
    attention=attention,
    rms_norm=rms_norm,
    rope=rope,
    experts=experts,
    linear_cross_entropy=partial(linear_cross_entropy, chunks=IN_CACHE, matmul=matmul_of_loss),
)


class CPUKernels(Kernels):
    """See :class:`~nanotrain_core.contracts.Kernels`."""

    def __init__(self, config: CPUKernelsConfig) -> None:
        self.config = config

    def prepare(self, device: torch.device) -> None:
        """Have freed memory kept in this process."""
        keep_freed_memory()

    def transport(self) -> Transport:
        """Return exchanges through shared memory if the config has them."""
        return SharedMemoryTransport() if self.config.shared_memory else Transport()

    def ops(self, device: torch.device) -> Ops:
        """Return functions for a CPU; elsewhere plain PyTorch."""
        return FASTER if device.type == "cpu" else TORCH_OPS

    def gemm(self) -> GEMMBackend:
        """Return the products in the faster library."""
        return CPUGEMM()

    def apply(self, part: nn.Module, passes: Passes) -> None:
        """Have float32 linear layers compute in the faster library, where this processor has one."""
        use_faster_products(part, passes)
