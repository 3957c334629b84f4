"""Kernels in Triton that make NVIDIA GPUs faster: experts chosen, and their rows permuted and combined.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

import attrs

from nanotrain_core.api import Component, Register, always_captured, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class CUDAKernelsConfig:
    """``[kernels] use = "cuda"``: no keys."""


@hookimpl
def nanotrain_register_kernels(register: Register) -> None:
    """Register ``cuda``."""
    register(
        Component(
            name="cuda",
            config=CUDAKernelsConfig,
            factory="nanotrain_cuda.kernels:CUDAKernels",
            summary="a router's choice, permute and unpermute of experts' rows as one Triton kernel each",
            provides={"kernels:cuda"},
            cuda_graphs=always_captured,
        )
    )
