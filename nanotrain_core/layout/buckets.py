"""Reduce-scatters and all-gathers of flat buckets, one after the other, through buffers used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from nanotrain_core.layout.exchange import Exchange

#: Waits for a collective that was begun, and returns its result.
Pending = Callable[[], torch.Tensor]

#: Fills a flat tensor that it is given with what this rank has of a bucket.
Write = Callable[[torch.Tensor], None]

#: Reduce-scatters in flight before the host waits for the first.
DEPTH = 2


class BucketExchange(Protocol):
    """Buckets are flat and have an equal range for each of the R ranks of a group, in their order.

    Every method but :meth:`forget` is collective: all ranks call the same ones, in the same order.
    """

    limit: int
    """Most bytes that a bucket should have here."""

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Begin to sum this rank's range of a bucket over the ranks; it is there after :meth:`drain`.

        Args:
            numel: numbers in the bucket.
            write: called before this returns, with a flat tensor [numel] of the dtype of ``into``.
            into: this rank's range, flat [numel / R].
            add: to what ``into`` holds, in place of overwriting it.
        """
        ...

    def all_gather(self, whole: torch.Tensor) -> Pending | None:
        """Begin to fill all ranges of ``whole``, a flat bucket, of which this rank's own is there.

        Returns:
            What waits for it; None: it is there after :meth:`drain`.
        """
        ...

    def drain(self) -> None:
        """Return when all reduce-scatters that were begun are done, and all-gathers without a wait."""
        ...

    def forget(self) -> None:
        """Drop what a step that was broken off, on all ranks, has begun."""
        ...


class GroupBuckets(BucketExchange):
    """Through a process group: a few reduce-scatters in flight, and all-gathers that go on meanwhile."""

    def __init__(self, exchange: Exchange, limit: int) -> None:
        self.exchange, self.limit = exchange, limit
        self._flying: deque[tuple[Pending, Callable[[], None]]] = deque()
        self._free: list[torch.Tensor] = []

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Add up what arrives, in the order of ranks, a few buckets later."""
        sent = self._lend(numel, into)
        write(sent)
        received = self._lend(self.exchange.summands * len(into), into)

        def finish() -> None:
            first, *rest = received.view(-1, len(into))
            (into.add_ if add else into.copy_)(first)
            for each in rest:
                into.add_(each)
            self._free += (sent, received)

        shares = sent.view(self.exchange.size, -1)
        pending = self.exchange.send_shares(received.view(-1, len(into)), shares, async_op=True)
        self._flying.append((pending, finish))
        while len(self._flying) > DEPTH:
            self._finish_one()

    def _finish_one(self) -> None:
        pending, finish = self._flying.popleft()
        pending()
        finish()

    def _lend(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer nobody uses, of the dtype and device of ``like``."""
        for number, free in enumerate(self._free):
            if free.dtype == like.dtype and len(free) == length:
                return self._free.pop(number)
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def all_gather(self, whole: torch.Tensor) -> Pending:
        """In place."""
        rows = whole.view(self.exchange.size, -1)
        return self.exchange.gather_into(rows, rows[self.exchange.rank], async_op=True)

    def drain(self) -> None:
        """Wait for all reduce-scatters."""
        while self._flying:
            self._finish_one()

    def forget(self) -> None:
        """Drop them."""
        self._flying.clear()
