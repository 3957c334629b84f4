"""How buckets of gradients and weights travel: by the run's transport, or nowhere in a group of one."""

from __future__ import annotations

import torch

from nanotrain_core.api import Span
from nanotrain_core.api.torch import BucketExchange, Mesh, Write
from nanotrain_zero12.flat import ALIGN


class Alone(BucketExchange):
    """A group of one: its range is all there is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Keep or add what is written."""
        if not add:
            write(into)
            return
        buffer = torch.empty_like(into)
        write(buffer)
        into.add_(buffer)

    def all_gather(self, whole: torch.Tensor) -> None:
        """Nothing to gather."""

    def drain(self) -> None:
        """Nothing is in flight."""

    def forget(self) -> None:
        """Nothing is in flight."""


def choose(span: Span, mesh: Mesh, limit: int) -> BucketExchange:
    """Return what exchanges buckets of about ``limit`` bytes over ``span``. Collective over its ranks."""
    exchange = mesh.exchange_of(span)
    if exchange is None:
        return Alone(limit)
    smallest = exchange.size * ALIGN * torch.float64.itemsize  # one aligned range per rank, widest dtype
    return exchange.buckets(limit, least=smallest)
