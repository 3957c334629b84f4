"""Fused kernels of torch's optimizers on ``meta``, where torch lacks some: they update tensors in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library
from torch.optim import optimizer

_META = Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]  # kept: torch forgets it otherwise


def _updates(*args: Any, **kwargs: Any) -> None:
    """Return nothing, as these operators do."""


for _name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _META.impl(_name, _updates)  # type: ignore[no-untyped-call]


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Let optimizers that ask for ``fused=True`` take tensors on ``meta`` within the context."""
    supported = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*supported(), "meta"]
    try:
        yield
    finally:
        optimizer._get_fused_kernels_supported_devices = supported
