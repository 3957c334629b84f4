"""Data parallelism: every rank trains on its own rows, and gradients are all-reduced in buckets.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Mapping
from typing import ClassVar

import attrs

from nanotrain_core.api import Component, Range, Register, always_captured, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class DataParallelConfig:
    """``[[parallel]] use = "ddp"``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "shared_memory": 'it is kernels.shared_memory, of [kernels] use = "cpu", for the whole run',
    }

    bucket_mb: float = attrs.field(default=25.0, validator=Range(1e-6, 1e6))
    """Size of a bucket of gradients in MiB (2^20 bytes), as ``bucket_cap_mb`` of torch's DDP: small buckets
    start early, large ones have less overhead."""
    overlap: bool = True
    """Start a bucket's all-reduce during backward, as soon as its last gradient is available."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``ddp``."""
    register(
        Component(
            name="ddp",
            config=DataParallelConfig,
            factory="nanotrain_ddp.data_parallel:DataParallel",
            summary="bucketed gradient all-reduce overlapped with backward",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
            cuda_graphs=always_captured,
        )
    )
