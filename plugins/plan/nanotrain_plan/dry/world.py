"""A world of ranks that is one process: torch's fake process group, and the mesh of one rank in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import (
    EdgeMessages,
    Exchange,
    GlooExchange,
    Mesh,
    MessageKey,
    Messages,
    Transport,
)
from nanotrain_plan.dry.fused_optimizers import fused_on_meta


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process rank ``rank`` of ``size`` within the context: collectives transfer nothing.

    Raises:
        NanotrainError: this process is a rank of a real run.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise NanotrainError("a plan cannot be made within a run: this process is one of its ranks")
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with fused_on_meta():
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # which torch prefixes with the rank


class Surveyed(Exception):
    """Carries the first value that a pipeline rank gathers: the names of its parameters."""


class DryMesh(Mesh):
    """A mesh without other ranks: the values of others are equal to this rank's, or given beforehand."""

    def __init__(
        self, *args: Any, told: list[Any] | None, host: bool, lasting: bool = True, **kwargs: Any
    ) -> None:
        """Create the mesh: arguments of :class:`Mesh`, and further ones.

        Args:
            args: of the mesh.
            told: what each pipeline rank gathers first, the names of its parameters; None raises
                :class:`Surveyed` with what this rank does.
            host: whether ranks compute on CPUs, and exchange tensors as gloo does.
            lasting: whether a message is held until the next one is sent, as in a run; in a probe of several
                stages the next one is another's.
            kwargs: of the mesh.
        """
        kwargs["transport"] = (HostTransport if host else DeviceTransport)(lasting=lasting)
        self._told, self._asked, self._host = told, False, host
        super().__init__(*args, **kwargs)

    @property
    def device_is_async(self) -> bool:
        """Whether the device that is planned for is, on which an optimizer's dtypes and kernels depend."""
        return not self._host

    def gather(self, value: Any, *dims: str) -> list[Any]:
        """Return what all ranks would say.

        Of parameters that wrappers add only this rank's are known: one that they give several stages counts
        as one stage's own, and its gradients' sum over pipeline ranks is not planned.
        """
        if dims == ("pp",) and not self._asked:
            self._asked = True
            if self._told is None:
                raise Surveyed(value)
            return list(self._told)
        if dims == ("pp",) and isinstance(value, dict):  # parameters again, with those that wrappers added
            own = self.coordinate("pp")
            return [value if rank == own else {} for rank in range(self.size("pp"))]
        return [value] * (self.size(*dims) if dims else self.world_size)

    def skip_group(self) -> None:
        """Count nothing: no other rank makes a group meanwhile."""


class DeviceTransport(Transport):
    """What devices exchange through NCCL."""

    def __init__(self, *, lasting: bool = True) -> None:
        self.lasting = lasting

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return NCCL's collectives."""
        return DeviceExchange(group, device)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return messages along edges of their own."""
        return (LeavingMessages if self.lasting else BriefEdgeMessages)(owners, mesh)


class DeviceExchange(Exchange):
    """NCCL's collectives, recorded on ``meta``, for which torch has no batches of messages."""

    shift = GlooExchange.shift


class LeavingMessages(EdgeMessages):
    """Messages that are dropped when the next one is sent, since here no rank receives them."""

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Send, and drop all messages sent before."""
        self._sent.clear()
        super().send(key, tensor)


class BriefEdgeMessages(EdgeMessages):
    """Messages that nobody holds."""

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Send, and keep no reference to it."""
        super().send(key, tensor)
        self._sent.clear()


class BriefMessages(Messages):
    """Messages that nobody holds, on a CPU."""

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Send, and keep no reference to it."""
        super().send(key, tensor)
        self._sent.clear()


class HostTransport(Transport):
    """What a CPU exchanges through gloo, recorded on ``meta``."""

    def __init__(self, *, lasting: bool = True) -> None:
        self.lasting = lasting

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return gloo's collectives."""
        return GlooExchange(group, device)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return messages that gloo takes."""
        return (Messages if self.lasting else BriefMessages)(owners, mesh)
