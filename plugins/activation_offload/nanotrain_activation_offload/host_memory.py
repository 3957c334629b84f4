"""Copies between a device and pinned host memory, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostMemory:
    """Copies at once, in the order of calls: for a device that is the host. CUDA's inherits from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy_out(self, flat_N: torch.Tensor) -> Any:
        """Begin to copy a tensor of one dimension to the host; return what :meth:`copy_back` takes."""
        return flat_N.clone()

    def copy_back(self, copied: Any) -> Callable[[], torch.Tensor]:
        """Begin to copy it back; what is returned gives the tensor [N], for use on the current stream."""
        return copied.clone  # type: ignore[no-any-return]


class PinnedMemory(HostMemory):
    """Copies on two side streams, one each way: neither the host nor the computation waits for them.

    The device's memory of a tensor that was copied out is free for others once its copy is done
    (``record_stream``). Pinned memory comes from torch's caching allocator, which waits in the same way.
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
    """Copies nothing, on ``meta``. A dry run takes pinned memory there for that of the host."""

    def copy_out(self, flat_N: torch.Tensor) -> torch.Tensor:
        """Take memory of the host."""
        return torch.empty(flat_N.shape, dtype=flat_N.dtype, device=self.device, pin_memory=True)

    def copy_back(self, copied: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Take memory of the device again."""
        came_back = torch.empty(copied.shape, dtype=copied.dtype, device=self.device)
        return lambda: came_back


def host_memory(device: torch.device) -> HostMemory:
    """Return what copies to and from ``device``."""
    if device.type == "meta":
        return NoMemory(device)
    return PinnedMemory(device) if device.type == "cuda" else HostMemory(device)
