"""The ``cpu`` kernels."""

from __future__ import annotations

import torch

from nanotrain_core.api.torch import Kernels, Transport
from nanotrain_cpu import CPUKernelsConfig
from nanotrain_cpu.memory import keep_freed_memory
from nanotrain_cpu.transport import SharedMemoryTransport


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
