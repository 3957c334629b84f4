"""The transport between ranks of one host: through memory that they share, where gloo would use sockets.

Between hosts, without shared memory, and where torch.distributed checks collectives (``DebugLevel.DETAIL``),
it behaves as the core's transport. Ranks determine together, by trying, which of the two applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist

from nanotrain_core.api.torch import (
    DIRECTIONS,
    BucketExchange,
    Buffer,
    Exchange,
    GlooExchange,
    Mesh,
    MessageKey,
    Messages,
    Pending,
    Transport,
    Write,
)
from nanotrain_cpu.channels import Channel, open_channels
from nanotrain_cpu.collectives import HostCollectives
from nanotrain_cpu.shared_memory import SharedBuffers, SharedRing, all_gather, reduce_scatter

#: Most bytes of a bucket that travels through shared memory: what stays in cache.
CACHED = 4 * 2**20


class SharedMemoryTransport(Transport):
    """See the module."""

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return the collectives of a group. What they share is made when it is first used."""
        if device.type != "cpu":
            return super().exchange(group, device, timeout)
        return SharedMemoryExchange(group, device, timeout)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return what passes messages between stages. Collective over the run."""
        if mesh.device.type != "cpu":
            return super().messages(owners, mesh)
        return SharedMemoryMessages(owners, mesh)


class SharedMemoryExchange(GlooExchange):
    """Collectives of one group. Background ones would need the cores that compute, so there are none."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        super().__init__(group, device)
        self.timeout = timeout

    @cached_property
    def host(self) -> HostCollectives | None:
        """Collectives of plain tensors; None on every rank if there are none. Collective when first asked."""
        return HostCollectives.open(self.group, self.timeout)

    @property
    def in_background(self) -> bool:
        """Copies through shared memory do not go on while this rank computes."""
        return self.host is None

    def all_reduce(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Sum at once."""
        if self.host is None:
            return super().all_reduce(x, async_op=async_op)
        return partial(_done, self.host.all_reduce(x))

    def all_reduce_sum_and_max(self, sums: torch.Tensor, most: torch.Tensor) -> None:
        """Exchange both at once.

        Over sockets every rank sends 4 (R - 1) messages for each of the two, however short they are, and each
        wakes a thread of its receiver: 4 ms of a rank's processor time where 4 ranks share 2 cores.
        """
        if self.host is None or not self.host.all_reduce_sum_and_max(sums, most):
            super().all_reduce_sum_and_max(sums, most)

    def all_gather(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Gather at once."""
        if self.host is None:
            return super().all_gather(x, async_op=async_op)
        return partial(_done, self.host.all_gather(x))

    def reduce_scatter(self, shares: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Sum at once."""
        if self.host is None:
            return super().reduce_scatter(shares, async_op=async_op)
        return partial(_done, self.host.reduce_scatter(shares))

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return memory that the other ranks can read. Collective."""
        buffers = SharedBuffers.open(numel, dtype, self.group, self.timeout)
        return super().buffer(numel, dtype) if buffers is None else SharedBuffer(buffers)

    def buckets(self, limit: int, *, least: int) -> BucketExchange:
        """Return a ring of small buffers that the other ranks can read. Collective."""
        cached = min(limit, CACHED)
        ring = SharedRing.open(max(cached, least), self.group, self.timeout)
        return super().buckets(limit, least=least) if ring is None else SharedBuckets(ring, cached)


def _done(result: torch.Tensor) -> torch.Tensor:
    return result


class SharedBuffer(Buffer):
    """A buffer that is summed in the wait for its sum: nothing runs in the background."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.buffers, self.flat = buffers, buffers.mine

    def all_reduce(self) -> Pending:
        """Return a function that computes and returns the sum. Collective when called."""
        return self._sum

    def _sum(self) -> torch.Tensor:
        self.buffers.all_reduce()
        return self.flat


class SharedBuckets(BucketExchange):
    """Through a ring of small buffers that all ranks of the host read, each a turn later."""

    def __init__(self, ring: SharedRing, limit: int) -> None:
        self.ring, self.limit, self.rank = ring, limit, ring.turns[0].rank
        self.ranks = len(ring.turns[0].buffers)

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Write where others read; add up this rank's range a turn later."""
        write(self.ring.begin()[: numel * into.itemsize].view(into.dtype))
        self.ring.send(partial(reduce_scatter, start=self.rank * len(into), into=into, add=add))

    def all_gather(self, whole: torch.Tensor) -> None:
        """Show this rank's range; copy the others' a turn later."""
        own = whole.view(self.ranks, -1)[self.rank]
        self.ring.begin()[: own.nbytes].view(own.dtype).copy_(own)
        self.ring.send(partial(all_gather, into=whole, rank=self.rank))

    def drain(self) -> None:
        """Read the last turn."""
        self.ring.drain()

    def forget(self) -> None:
        """Leave it unread."""
        self.ring.forget()


class SharedMemoryMessages(Messages):
    """Messages that fit in a channel are sent through it; others, and descriptions, over gloo."""

    def __init__(self, owners: Sequence[int], mesh: Mesh) -> None:
        self.channels: dict[tuple[str, int], Channel] = {}
        super().__init__(owners, mesh)

    def _make_groups(self) -> None:
        super()._make_groups()
        pairs = {edge: self.owners[edge : edge + 2] for edge in self.crossing}
        ends: dict[tuple[str, int], Sequence[int]] = {("forward", edge): pair for edge, pair in pairs.items()}
        ends |= {("backward", edge): pair[::-1] for edge, pair in pairs.items()}
        group = self._groups[DIRECTIONS[0], self.crossing[0]]
        self.channels = open_channels(ends, group, self.mesh.timeout.total_seconds())

    def _channel(self, key: MessageKey, tensor: torch.Tensor) -> Channel | None:
        """Return the channel for ``tensor``, or None if it must be sent over gloo."""
        way, edge, number = key
        channel = self.channels.get((way, edge)) if number >= 0 else None
        return channel if channel and channel.holds(tensor) else None

    def begin(self, microbatches: int) -> None:
        """Begin a step of so many. Collective."""
        super().begin(microbatches)
        for channel in self.channels.values():
            channel.begin(microbatches)

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Write ``tensor`` where its receiver reads."""
        if channel := self._channel(key, tensor):
            channel.send(tensor, key[2])
        else:
            super().send(key, tensor)

    def receive(self, key: MessageKey, into: torch.Tensor) -> None:
        """Copy what its sender has written."""
        if channel := self._channel(key, into):
            channel.receive(into, key[2])
        else:
            super().receive(key, into)
