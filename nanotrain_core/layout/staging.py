"""Ranks sharing one GPU: tensors go through host memory and gloo, as NCCL refuses two ranks on one device.

For tests of multi-rank GPU code with fewer GPUs than ranks. Collectives wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.buckets import Pending
from nanotrain_core.layout.exchange import Buffer, Exchange, GlooExchange
from nanotrain_core.layout.messages import MessageKey, Messages
from nanotrain_core.layout.transport import Transport

if TYPE_CHECKING:
    from nanotrain_core.layout.mesh import Mesh

#: Copies to the host, or from there to a device.
Copy = Callable[[torch.Tensor], torch.Tensor]


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, contiguous, once it is complete."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)


@attrs.define(frozen=True)
class StagedTransport(Transport):
    """The transport of ranks that share a GPU: see the module."""

    down: Copy = to_host
    """Makes a copy on the host that nothing else modifies."""

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return the collectives of a group.

        Raises:
            NanotrainError: it is a group of NCCL.
        """
        if dist.get_backend(group) == "nccl":
            raise NanotrainError(
                "run.share_device = true needs gloo process groups, because NCCL does not support two ranks "
                'on one GPU: use init_process_group("gloo"), or one GPU per rank'
            )
        return StagedExchange(group, device, self.down)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return the send/recv messages between stages. Collective over the run."""
        return StagedMessages(owners, mesh, self.down)


class StagedExchange(Exchange):
    """Collectives of one group, on copies on the host."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, down: Copy) -> None:
        super().__init__(group, device)
        self.down, self.host = down, GlooExchange(group, torch.device("cpu"))
        self.rows_to_sum = self.host.rows_to_sum

    def all_reduce(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to all-reduce copies."""
        pending = self.host.all_reduce(self.down(x), async_op=async_op)
        return lambda: pending().to(x.device)

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return device memory."""
        return StagedBuffer(self, torch.empty(numel, dtype=dtype, device=self.device))

    def all_gather_into(self, out: torch.Tensor, own: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to all-gather copies."""
        gathered = torch.empty(out.shape, dtype=out.dtype)
        pending = self.host.all_gather_into(gathered, self.down(own), async_op=async_op)
        return lambda: out.copy_(pending())

    def reduce_scatter_into(
        self, received: torch.Tensor, shares: torch.Tensor, *, async_op: bool = False
    ) -> Pending:
        """Begin to send copies."""
        coming = torch.empty(received.shape, dtype=received.dtype)
        pending = self.host.reduce_scatter_into(coming, self.down(shares), async_op=async_op)
        return lambda: received.copy_(pending())

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Pending:
        """Begin an all-to-all of copies of rows."""
        coming = torch.empty(received.shape, dtype=received.dtype)
        rows = received_rows, sent_rows
        pending = self.host.all_to_all(coming, self.down(sent), *rows, async_op=async_op)
        return lambda: received.copy_(pending())

    def shift(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Begin to send a copy to the next rank."""
        coming = torch.empty(received.shape, dtype=received.dtype)
        pending = self.host.shift(coming, self.down(sent))
        return lambda: received.copy_(pending())


class StagedBuffer(Buffer):
    """Device memory, all-reduced on the host."""

    def __init__(self, exchange: StagedExchange, flat: torch.Tensor) -> None:
        self.exchange, self.flat = exchange, flat

    def all_reduce(self) -> Pending:
        """Begin to all-reduce a copy."""
        pending = self.exchange.all_reduce(self.flat, async_op=True)
        return lambda: self.flat.copy_(pending())


class StagedMessages(Messages):
    """Send/recv of copies."""

    def __init__(self, owners: Sequence[int], mesh: Mesh, down: Copy) -> None:
        self.down = down
        super().__init__(owners, mesh)

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Begin to send a copy."""
        super().send(key, self.down(tensor))

    def receive(self, key: MessageKey, into: torch.Tensor) -> None:
        """Receive a message on the host, and copy it to its destination."""
        arrived = torch.empty(into.shape, dtype=into.dtype)
        super().receive(key, arrived)
        into.copy_(arrived)
