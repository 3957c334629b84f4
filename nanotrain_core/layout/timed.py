"""Exchanges whose time is counted as this rank's waiting, whatever transport they are of."""

from __future__ import annotations

import torch

from nanotrain_core.layout.buckets import BucketExchange, Pending, Write
from nanotrain_core.layout.exchange import Buffer, Exchange
from nanotrain_core.watch.waits import Waits

#: The methods of an exchange that talk. Each returns what waits for the end of what it has begun.
TALKING = ("all_reduce", "all_gather", "reduce_scatter", "gather_into", "send_shares", "all_to_all")


class TimedExchange(Exchange):
    """Passes everything on."""

    def __init__(self, behind: Exchange, waits: Waits) -> None:
        self.behind, self.waits = behind, waits
        self.group, self.device = behind.group, behind.device
        self.size, self.rank, self.summands = behind.size, behind.rank, behind.summands
        for name in TALKING:
            setattr(self, name, waits.around(getattr(behind, name)))

    @property
    def in_background(self) -> bool:
        """As behind. Collective when first asked."""
        return self.behind.in_background

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Return memory whose sums are counted."""
        return TimedBuffer(self.behind.buffer(numel, dtype), self.waits)

    def buckets(self, limit: int, *, least: int) -> BucketExchange:
        """Return an exchange of buckets that is counted."""
        return TimedBuckets(self.behind.buckets(limit, least=least), self.waits)


class TimedBuffer(Buffer):
    """Passes everything on."""

    def __init__(self, behind: Buffer, waits: Waits) -> None:
        self.behind, self.flat = behind, behind.flat
        self._all_reduce = waits.around(behind.all_reduce)

    def all_reduce(self) -> Pending:
        """See behind."""
        pending: Pending = self._all_reduce()
        return pending


class TimedBuckets(BucketExchange):
    """Passes everything on."""

    def __init__(self, behind: BucketExchange, waits: Waits) -> None:
        self.behind, self.limit, self.waits = behind, behind.limit, waits
        self._all_gather = waits.around(behind.all_gather)

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """See behind."""
        with self.waits.collectives:
            self.behind.reduce_scatter(numel, write, into, add=add)

    def all_gather(self, whole: torch.Tensor) -> Pending | None:
        """See behind."""
        pending: Pending | None = self._all_gather(whole)
        return pending

    def drain(self) -> None:
        """See behind."""
        with self.waits.collectives:
            self.behind.drain()

    def forget(self) -> None:
        """See behind."""
        self.behind.forget()
