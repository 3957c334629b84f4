"""The ``cpu`` kernels."""

from __future__ import annotations

from nanotrain_core.contracts import Kernels
from nanotrain_cpu import CPUKernelsConfig


class CPUKernels(Kernels):
    """See :class:`~nanotrain_core.contracts.Kernels`."""

    def __init__(self, config: CPUKernelsConfig) -> None:
        self.config = config
