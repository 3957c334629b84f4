"""Collectives of one process group: by default through torch.distributed.

Shapes: R ranks in the group. Every method is collective: all ranks of the group call the same ones, in the
same order, with tensors of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from nanotrain_core.layout.buckets import BucketExchange, GroupBuckets, Pending

#: Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffer(Protocol):
    """Memory that is all-reduced repeatedly, in place."""

    flat: torch.Tensor
    """Fill it, then all-reduce it. Its initial content is undefined."""

    def all_reduce(self) -> Pending:
        """Begin to all-reduce :attr:`flat` in place; the result is :attr:`flat`. Collective.

        The communication may happen only during the wait: ranks wait for several buffers in one order.
        """
        ...


class Exchange:
    """Collectives of one group, implemented by the device's backend (NCCL).

    ``async_op`` is torch's: do not wait for the collective before the call returns. Either way its result
    is obtained from the return value. On a device, the stream waits, not the host.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.rows_to_sum = 1
        """The number of rows that each rank sums of what :meth:`reduce_scatter_into` receives: 1 for a native
        reduce-scatter, :attr:`size` for one implemented as an all-to-all."""

    @property
    def in_background(self) -> bool:
        """Whether collectives overlap with this rank's computation. The first access is collective."""
        return True

    def all_reduce(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to all-reduce ``x`` into a new tensor."""
        total = x.clone(memory_format=torch.contiguous_format)
        return _result(dist.all_reduce(total, group=self.group, async_op=async_op), total)

    def all_reduce_sum_and_max(self, sums: torch.Tensor, most: torch.Tensor) -> None:
        """All-reduce both tensors in place, ``sums`` by SUM and ``most`` by MAX, at the same time."""
        ops = (sums, dist.ReduceOp.SUM), (most, dist.ReduceOp.MAX)
        works = [dist.all_reduce(x, op=op, group=self.group, async_op=True) for x, op in ops]
        _wait(works, sums)

    def all_gather(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to all-gather ``x`` into a new tensor [R, *x.shape]."""
        return self.all_gather_into(x.new_empty(self.size, *x.shape), x, async_op=async_op)

    def reduce_scatter(self, shares: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to reduce-scatter ``shares``: sum every rank's ``shares[r]`` into a new tensor on rank r.

        Args:
            shares: [R, ...], contiguous.
            async_op: see the class.
        """
        received = torch.empty_like(shares[: self.rows_to_sum])
        pending = self.reduce_scatter_into(received, shares, async_op=async_op)
        return (lambda: pending().sum(0)) if self.rows_to_sum > 1 else (lambda: pending()[0])

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return a flat buffer of ``numel`` elements, in memory that this group all-reduces fastest."""
        return GroupBuffer(self.group, torch.empty(numel, dtype=dtype, device=self.device))

    def buckets(self, limit: int, *, least: int) -> BucketExchange:
        """Return an object that reduce-scatters and all-gathers flat buckets, one after the other.

        Args:
            limit: maximum bytes of a bucket. The result's own limit may be lower.
            least: a lower bound on the result's own limit, in bytes.
        """
        return GroupBuckets(self, limit)

    # --- the primitives of the above, for existing tensors ----------------------------------------

    def all_gather_into(self, out: torch.Tensor, own: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Begin to all-gather ``own`` [...] into ``out`` [R, ...]; ``own`` may be its row of ``out``."""
        own = own.contiguous()
        work = _all_gather(out.flatten(0, 1), own, group=self.group, async_op=async_op)
        return _result(work, out, own)

    def reduce_scatter_into(
        self, received: torch.Tensor, shares: torch.Tensor, *, async_op: bool = False
    ) -> Pending:
        """Begin to send ``shares[r]`` to rank r of the group, which is to hold the sum over all ranks.

        Args:
            received: [:attr:`rows_to_sum`, ...]: its rows add up to that sum.
            shares: [R, ...], contiguous.
            async_op: see the class.
        """
        work = _reduce_scatter(received[0], shares.flatten(0, 1), group=self.group, async_op=async_op)
        return _result(work, received, shares)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Pending:
        """Begin an all-to-all of rows from ``sent`` into ``received``, both in the group's rank order.

        Args:
            received: [M, ...], contiguous.
            sent: [N, ...], contiguous.
            received_rows: number of rows from each rank; None: the same number from each.
            sent_rows: number of rows to each rank.
            async_op: see the class.
        """
        rows = received_rows, sent_rows
        work = dist.all_to_all_single(received, sent, *rows, group=self.group, async_op=async_op)
        return _result(work, received, sent)

    def shift(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Begin to send to the next rank of the group, and to receive from the one before: a ring.

        As one operation: NCCL, which works through operations in order, would wait for the first of two.

        Args:
            received: contiguous, of the shape that the rank before this one sends.
            sent: contiguous.
        """
        ops = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return partial(_wait, dist.batch_isend_irecv(ops), received, sent)


class GlooExchange(Exchange):
    """An :class:`Exchange` on a CPU, through sockets.

    gloo's own reduce-scatter and all-gather take two to four times as long as their replacements here: at
    128 MB and 2 ranks, 225 ms against 60 and 185 against 50.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.rows_to_sum = self.size

    def all_gather_into(self, out: torch.Tensor, own: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Broadcast each rank's row: gloo's fastest method at most sizes above 1 MB."""
        if out[self.rank].data_ptr() != own.data_ptr():
            out[self.rank].copy_(own)
        works = [
            dist.broadcast(row, group_src=source, group=self.group, async_op=True)
            for source, row in enumerate(out)
        ]
        return partial(_wait, works, out)

    def reduce_scatter_into(
        self, received: torch.Tensor, shares: torch.Tensor, *, async_op: bool = False
    ) -> Pending:
        """All-to-all: each rank receives one part from every rank and sums them."""
        work = dist.all_to_all_single(received, shares, group=self.group, async_op=async_op)
        return _result(work, received, shares)

    def shift(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Send and receive: gloo has no order of operations."""
        works = (
            dist.isend(sent, group=self.group, group_dst=(self.rank + 1) % self.size),
            dist.irecv(received, group=self.group, group_src=(self.rank - 1) % self.size),
        )
        return partial(_wait, works, received, sent)


class GroupBuffer(Buffer):
    """A buffer in ordinary memory, which the group's backend all-reduces."""

    def __init__(self, group: dist.ProcessGroup, flat: torch.Tensor) -> None:
        self.group, self.flat = group, flat

    def all_reduce(self) -> Pending:
        """Begin to sum the buffer over the group."""
        return _result(dist.all_reduce(self.flat, group=self.group, async_op=True), self.flat)


def _result(work: dist.Work | None, result: torch.Tensor, *held: torch.Tensor) -> Pending:
    return partial(_wait, [work], result, *held)


def _wait(works: Sequence[dist.Work | None], result: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
    """Wait; on a device, make later computation wait. ``held``: tensors to keep alive until then."""
    for work in works:
        if work is not None:
            work.wait()
    return result
