"""Wraps a transport's collectives and adds their time to this rank's communication time."""

from __future__ import annotations

import torch

from nanotrain_core.layout.buckets import BucketExchange, Pending, Write
from nanotrain_core.layout.exchange import Buffer, Exchange
from nanotrain_core.watch.waits import Waits

#: The methods that communicate. Each returns an object that waits for the collective to complete, or None.
COLLECTIVES = (
    "all_reduce",
    "all_reduce_sum_and_max",
    "all_gather",
    "reduce_scatter",
    "all_gather_into",
    "reduce_scatter_into",
    "all_to_all",
    "shift",
)


class TimedExchange(Exchange):
    """Delegates to the wrapped exchange and times it."""

    def __init__(self, behind: Exchange, waits: Waits) -> None:
        self.behind, self.waits = behind, waits
        self.group, self.device = behind.group, behind.device
        self.size, self.rank, self.rows_to_sum = behind.size, behind.rank, behind.rows_to_sum
        for name in COLLECTIVES:
            setattr(self, name, waits.timed(getattr(behind, name)))

    @property
    def in_background(self) -> bool:
        """As the wrapped exchange. The first access is collective."""
        return self.behind.in_background

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return a buffer whose all-reduces are timed."""
        return TimedBuffer(self.behind.buffer(numel, dtype), self.waits)

    def buckets(self, limit: int, *, least: int) -> BucketExchange:
        """Return a bucket exchange that is timed."""
        return TimedBuckets(self.behind.buckets(limit, least=least), self.waits)


class TimedBuffer(Buffer):
    """Delegates to the wrapped buffer and times it."""

    def __init__(self, behind: Buffer, waits: Waits) -> None:
        self.behind, self.flat = behind, behind.flat
        self._all_reduce = waits.timed(behind.all_reduce)

    def all_reduce(self) -> Pending:
        """As the wrapped buffer."""
        pending: Pending = self._all_reduce()
        return pending


class TimedBuckets(BucketExchange):
    """Delegates to the wrapped bucket exchange and times it."""

    def __init__(self, behind: BucketExchange, waits: Waits) -> None:
        self.behind, self.limit, self.waits = behind, behind.limit, waits
        self._all_gather = waits.timed(behind.all_gather)

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """As the wrapped exchange."""
        with self.waits.collectives:
            self.behind.reduce_scatter(numel, write, into, add=add)

    def all_gather(self, whole: torch.Tensor) -> Pending | None:
        """As the wrapped exchange."""
        pending: Pending | None = self._all_gather(whole)
        return pending

    def drain(self) -> None:
        """As the wrapped exchange."""
        with self.waits.collectives:
            self.behind.drain()

    def forget(self) -> None:
        """As the wrapped exchange."""
        self.behind.forget()
