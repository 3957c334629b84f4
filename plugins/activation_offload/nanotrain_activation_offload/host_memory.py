"""Copies between a device and pinned host memory, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostMemory:
    """Copies synchronously, for a CPU device; the base class of copiers for other devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy_out(self, flat_N: torch.Tensor) -> Any:
        """Begin to copy a flat tensor [N] to the host; return a handle for :meth:`copy_back`."""
        return flat_N.clone()

    def copy_back(self, copied: Any) -> Callable[[], torch.Tensor]:
        """Begin to copy back; return a function that returns the tensor [N], usable on the current stream."""
        return copied.clone  # type: ignore[no-any-return]


class PinnedMemory(HostMemory):
    """Copies on two side streams, one each way: neither the host nor the computation waits for them.

    Device memory of a tensor that is copied out can be reused once its copy is complete (``record_stream``).
    Pinned memory is from torch's caching allocator, which also waits for copies before it reuses memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_out(self, flat_N: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """See :class:`HostMemory`."""
        host_N = torch.empty(flat_N.shape, dtype=flat_N.dtype, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            host_N.copy_(flat_N, non_blocking=True)
        flat_N.record_stream(self.out)
        return host_N, self.out.record_event()

    def copy_back(self, copied: tuple[torch.Tensor, torch.cuda.Event]) -> Callable[[], torch.Tensor]:
        """See :class:`HostMemory`."""
        host_N, there = copied
        with torch.cuda.stream(self.back):
            self.back.wait_event(there)
            device_N = host_N.to(self.device, non_blocking=True)
        arrived = self.back.record_event()

        def take() -> torch.Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            device_N.record_stream(stream)
            return device_N

        return take


class NoMemory(HostMemory):
    """Allocates without copying, on ``meta``. A dry run counts pinned memory there as host memory."""

    def copy_out(self, flat_N: torch.Tensor) -> torch.Tensor:
        """Return a pinned ``meta`` tensor, which counts as host memory."""
        return torch.empty(flat_N.shape, dtype=flat_N.dtype, device=self.device, pin_memory=True)

    def copy_back(self, copied: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns a ``meta`` tensor, which counts as device memory."""
        came_back = torch.empty(copied.shape, dtype=copied.dtype, device=self.device)
        return lambda: came_back


def host_memory(device: torch.device) -> HostMemory:
    """Return what copies to and from ``device``."""
    if device.type == "meta":
        return NoMemory(device)
    return PinnedMemory(device) if device.type == "cuda" else HostMemory(device)
