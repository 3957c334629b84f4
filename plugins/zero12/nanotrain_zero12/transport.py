"""How gradients and weights travel between the ranks of a group: chosen by what they have in common.

| ranks                          | reduce-scatter                         | all-gather             |
|--------------------------------|----------------------------------------|------------------------|
| one                            | none                                   | none                   |
| of one host, on CPU            | through shared memory                  | through shared memory  |
| on CPU otherwise (gloo)        | all-to-all, then a local sum           | a broadcast per rank   |
| on GPUs (NCCL)                 | ``reduce_scatter_tensor``              | ``all_gather_into_tensor`` |

gloo's own reduce-scatter and all-gather take two to four times as long as what stands in for them: at 128 MB
and 2 ranks, 225 ms against 60 and 185 against 50.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from nanotrain_core.host.shared_memory import SharedRing, all_gather, reduce_scatter
from nanotrain_core.layout.mesh import Mesh
from nanotrain_zero12.flat import ALIGN, Bucket

#: Copies this rank's gradients into a bucket's buffer.
Write = Callable[[torch.Tensor], None]

#: Reduce-scatters in flight before the host waits for the first.
DEPTH = 2

#: Most bytes of a bucket that travels through shared memory.
CACHED = 4 * 2**20


class Transport(Protocol):
    """Exchanges buckets with the other ranks of a group. All of them call the same, in the same order."""

    limit: int
    """Most bytes of gradient in a bucket."""

    def reduce_scatter(self, bucket: Bucket, write: Write) -> None:
        """Begin to sum what all ranks ``write`` into their :attr:`Bucket.shard`."""
        ...

    def all_gather(self, bucket: Bucket) -> Sequence[dist.Work]:
        """Bring :attr:`Bucket.weights` up to date; return what to wait for if that is still going on."""
        ...

    def drain(self) -> None:
        """Return when all that was begun is done."""
        ...

    def forget(self) -> None:
        """Drop what a step that was broken off has begun."""
        ...


def settle(bucket: Bucket, ranges: Sequence[torch.Tensor]) -> None:
    """Put a sum of ``ranges``, in their order, into the shard: the first one of a step, or one more."""
    rest = iter(ranges)
    if not bucket.summed:
        bucket.shard.copy_(next(rest))
    for each in rest:
        bucket.shard.add_(each)
    bucket.summed = True


class Alone:
    """A group of one: its range is all there is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def reduce_scatter(self, bucket: Bucket, write: Write) -> None:
        """Keep or add what is written."""
        buffer = torch.empty_like(bucket.shard) if bucket.summed else bucket.shard
        write(buffer)
        if bucket.summed:
            bucket.shard.add_(buffer)
        bucket.summed = True

    def all_gather(self, bucket: Bucket) -> Sequence[dist.Work]:
        """Nothing to gather."""
        return ()

    def drain(self) -> None:
        """Nothing is in flight."""

    def forget(self) -> None:
        """Nothing is in flight."""


class SharedMemory:
    """Through a ring of small buffers that all ranks of the host read."""

    def __init__(self, ring: SharedRing, limit: int) -> None:
        self.ring, self.limit, self.rank = ring, limit, ring.turns[0].rank

    def reduce_scatter(self, bucket: Bucket, write: Write) -> None:
        """Write where others read; add up this rank's range a turn later."""
        dtype = bucket.shard.dtype
        write(self.ring.begin()[: bucket.length * dtype.itemsize].view(dtype))
        add, bucket.summed = bucket.summed, True
        self.ring.send(partial(reduce_scatter, start=bucket.own.start, into=bucket.shard, add=add))

    def all_gather(self, bucket: Bucket) -> Sequence[dist.Work]:
        """Show this rank's range; copy the others' a turn later."""
        own = bucket.own_weights
        self.ring.begin()[: own.nbytes].view(own.dtype).copy_(own)
        self.ring.send(partial(all_gather, into=bucket.weights, rank=self.rank))
        return ()

    def drain(self) -> None:
        """Read the last turn."""
        self.ring.drain()

    def forget(self) -> None:
        """Leave it unread."""
        self.ring.forget()


class Collectives:
    """Reduce-scatters through buffers that are used again, a few of them in flight."""

    def __init__(self, group: dist.ProcessGroup, limit: int) -> None:
        self.group, self.limit, self.ranks = group, limit, dist.get_world_size(group)
        self._flying: deque[tuple[dist.Work, Callable[[], None]]] = deque()
        self._free: list[torch.Tensor] = []

    def begin(self, work: dist.Work | None, finish: Callable[[], None]) -> None:
        """Have ``finish`` called when ``work`` is done, and wait for older work if there is much of it."""
        assert work is not None
        self._flying.append((work, finish))
        while len(self._flying) > DEPTH:
            self._finish_one()

    def _finish_one(self) -> None:
        work, finish = self._flying.popleft()
        work.wait()
        finish()

    def lend(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer nobody uses, of the dtype and device of ``like``."""
        for number, free in enumerate(self._free):
            if free.dtype == like.dtype and len(free) == length:
                return self._free.pop(number)
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def give_back(self, *buffers: torch.Tensor) -> None:
        """Take buffers back."""
        self._free.extend(buffers)

    def drain(self) -> None:
        """Wait for all reduce-scatters."""
        while self._flying:
            self._finish_one()

    def forget(self) -> None:
        """Drop them."""
        self._flying.clear()


class Gloo(Collectives):
    """Through sockets."""

    def reduce_scatter(self, bucket: Bucket, write: Write) -> None:
        """All-to-all, then a local sum in the order of ranks."""
        sent = self.lend(bucket.length, bucket.shard)
        write(sent)
        received = self.lend(len(sent), bucket.shard)

        def finish() -> None:
            settle(bucket, received.tensor_split(self.ranks))
            self.give_back(sent, received)

        self.begin(dist.all_to_all_single(received, sent, group=self.group, async_op=True), finish)

    def all_gather(self, bucket: Bucket) -> Sequence[dist.Work]:
        """Broadcast: every rank its range."""
        ranges = bucket.weights.tensor_split(self.ranks)
        return [
            dist.broadcast(part, group_src=rank, group=self.group, async_op=True)
            for rank, part in enumerate(ranges)
        ]


class NCCL(Collectives):
    """Between GPUs: waiting is the stream's, not the host's."""

    def reduce_scatter(self, bucket: Bucket, write: Write) -> None:
        """Reduce-scatter in float32 or wider, whatever the weights are."""
        sent = self.lend(bucket.length, bucket.shard)
        write(sent)
        received = self.lend(len(bucket.shard), bucket.shard)

        def finish() -> None:
            settle(bucket, [received])
            self.give_back(sent, received)

        self.begin(dist.reduce_scatter_tensor(received, sent, group=self.group, async_op=True), finish)

    def all_gather(self, bucket: Bucket) -> Sequence[dist.Work]:
        """All-gather in place."""
        own = bucket.own_weights
        work = dist.all_gather_into_tensor(bucket.weights, own, group=self.group, async_op=True)
        return [] if work is None else [work]


def choose(group: dist.ProcessGroup | None, mesh: Mesh, limit: int, *, share: bool) -> Transport:
    """Return the transport of a group, for buckets of about ``limit`` bytes. Collective over the group."""
    if group is None:
        return Alone(limit)
    if mesh.device.type == "cuda":
        return NCCL(group, limit)
    cached = min(limit, CACHED)
    timeout = mesh.timeout.total_seconds()
    ring = SharedRing.open(max(cached, smallest(group)), group, timeout) if share else None
    return Gloo(group, limit) if ring is None else SharedMemory(ring, cached)


def smallest(group: dist.ProcessGroup) -> int:
    """Return the bytes of a bucket with one aligned range per rank, in the widest dtype there is."""
    return dist.get_world_size(group) * ALIGN * torch.float64.itemsize
