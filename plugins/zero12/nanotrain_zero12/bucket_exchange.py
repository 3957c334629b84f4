"""The collectives of gradient and weight buckets: those of the run's transport, or none in a group of one."""

from __future__ import annotations

import torch

from nanotrain_core.api import Span
from nanotrain_core.api.torch import BucketExchange, Mesh, Write
from nanotrain_zero12.flat import ALIGN


class SingleRankExchange(BucketExchange):
    """A group of one rank, whose range is the whole bucket."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Store or accumulate what is written."""
        if not add:
            write(into)
            return
        buffer = torch.empty_like(into)
        write(buffer)
        into.add_(buffer)

    def all_gather(self, whole: torch.Tensor) -> None:
        """Do nothing: there is nothing to gather."""

    def drain(self) -> None:
        """Do nothing: nothing is in flight."""

    def forget(self) -> None:
        """Do nothing: nothing is in flight."""


def bucket_exchange(span: Span, mesh: Mesh, limit: int) -> BucketExchange:
    """Return the collectives for buckets of about ``limit`` bytes over ``span``. Collective over ``span``."""
    exchange = mesh.exchange_of(span)
    if exchange is None:
        return SingleRankExchange(limit)
    smallest = exchange.size * ALIGN * torch.float64.itemsize  # one aligned range per rank, largest dtype
    return exchange.buckets(limit, least=smallest)
