"""Flags that any rank may raise between steps, without the host waiting for a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nanotrain_core.api.torch import Mesh


class LateFlag:
    """All-reduces a flag at every call. On a GPU each call returns the result of the previous call.

    Reading the flag of the same call would make the host wait for all work queued on the GPU, and then the
    GPU for the host.
    """

    def __init__(self, mesh: Mesh, *, late: bool | None = None) -> None:
        """``late``: whether to read one call late; by default, on an asynchronous device."""
        self.mesh = mesh
        self.late = mesh.device_is_async if late is None else late
        self._sent: tuple[torch.Tensor, torch.Event | None] | None = None

    def forget(self) -> None:
        """Discard the result of the previous call, which no longer applies. All ranks must call it."""
        self._sent = None

    def any(self, mine: bool) -> bool | None:
        """Collective. Return whether any rank raised its flag; None: not known before the next call."""
        if self.mesh.world_size == 1:
            return mine
        flag = torch.tensor([float(mine)]).to(self.mesh.device, non_blocking=True)
        self.mesh.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not self.late:
            return bool(flag.item())
        before, arrived = self._sent, None
        copy = flag.to("cpu", non_blocking=True)
        if flag.is_cuda:
            arrived = torch.Event(flag.device)
            arrived.record()
        self._sent = copy, arrived
        if before is None:
            return None
        copy, arrived = before
        if arrived is not None:
            arrived.synchronize()
        return bool(copy.item())
