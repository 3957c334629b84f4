"""Reduce-scatters and all-gathers of flat buckets, one after the other, through reused buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from nanotrain_core.layout.exchange import Exchange

#: Waits for a collective in flight, and returns its result.
Pending = Callable[[], torch.Tensor]

#: Fills the given flat tensor with this rank's contribution to a bucket.
Write = Callable[[torch.Tensor], None]

#: Reduce-scatters in flight before the host waits for the first.
DEPTH = 2


class BucketExchange(Protocol):
    """Collectives of flat buckets with an equal range for each of the R ranks of a group, in rank order.

    Every method but :meth:`forget` is collective: all ranks call the same ones, in the same order.
    """

    limit: int
    """Maximum bytes of a bucket."""

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Begin to reduce-scatter a bucket into this rank's range; it is available after :meth:`drain`.

        Args:
            numel: elements in the bucket.
            write: called before this returns, with a flat tensor [numel] of the dtype of ``into``.
            into: this rank's range, flat [numel / R].
            add: accumulate into ``into`` instead of overwriting it.
        """
        ...

    def all_gather(self, whole: torch.Tensor) -> Pending | None:
        """Begin to all-gather ``whole``, a flat bucket in which this rank's own range is filled.

        Returns:
            A function that waits for it; None: it is available after :meth:`drain`.
        """
        ...

    def drain(self) -> None:
        """Return when all reduce-scatters in flight are done, and all-gathers without a wait function."""
        ...

    def forget(self) -> None:
        """Discard what an interrupted step has begun. Called on all ranks."""
        ...


class GroupBuckets(BucketExchange):
    """Uses a process group: a few reduce-scatters in flight, and overlapped all-gathers."""

    def __init__(self, exchange: Exchange, limit: int) -> None:
        self.exchange, self.limit = exchange, limit
        self._flying: deque[tuple[Pending, Callable[[], None]]] = deque()
        self._free: list[torch.Tensor] = []

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Sum what arrives, in rank order, a few buckets later."""
        sent = self._acquire(numel, into)
        write(sent)
        received = self._acquire(self.exchange.rows_to_sum * len(into), into)

        def finish() -> None:
            first, *rest = received.view(-1, len(into))
            (into.add_ if add else into.copy_)(first)
            for each in rest:
                into.add_(each)
            self._free += (sent, received)

        shares = sent.view(self.exchange.size, -1)
        pending = self.exchange.reduce_scatter_into(received.view(-1, len(into)), shares, async_op=True)
        self._flying.append((pending, finish))
        while len(self._flying) > DEPTH:
            self._finish_one()

    def _finish_one(self) -> None:
        pending, finish = self._flying.popleft()
        pending()
        finish()

    def _acquire(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return an unused buffer with the dtype and device of ``like``."""
        for number, free in enumerate(self._free):
            if free.dtype == like.dtype and len(free) == length:
                return self._free.pop(number)
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def all_gather(self, whole: torch.Tensor) -> Pending:
        """All-gather in place."""
        rows = whole.view(self.exchange.size, -1)
        return self.exchange.all_gather_into(rows, rows[self.exchange.rank], async_op=True)

    def drain(self) -> None:
        """Wait for all reduce-scatters."""
        while self._flying:
            self._finish_one()

    def forget(self) -> None:
        """Discard all reduce-scatters."""
        self._flying.clear()
