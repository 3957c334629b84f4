"""The ranks that share each sequence, and their collectives.

Shapes: R ranks, B batch, S sequence, s a rank's part of it, S / R rounded down or up: parts may differ by one
    token. What is all-gathered and reduce-scattered is padded to the longest part, and shortened on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import Mesh, Pending, shard_range


class Ranks:
    """The ranks that share each sequence, and their collectives on plain tensors."""

    def __init__(self, mesh: Mesh) -> None:
        self.size, self.index = mesh.size("cp"), mesh.coordinate("cp")
        exchange = mesh.exchange("cp")
        assert exchange is not None, "cp = 1 has no collectives"
        self.exchange = exchange

    def edges(self, length: int) -> list[tuple[int, int]]:
        """Return the first token, and one past the last, of each rank's part of ``length`` tokens."""
        return [shard_range(length, index, self.size) for index in range(self.size)]

    def parts(self, length: int) -> list[int]:
        """Return how many tokens each rank has."""
        return [end - begin for begin, end in self.edges(length)]

    def begin_all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """Begin to send rows of ``x`` [N, ...], so many to each rank, and to receive so many."""
        rows = x.new_empty(sum(received), *x.shape[1:])
        return self.exchange.all_to_all(rows, x.contiguous(), [*received], [*sent], async_op=True)

    def begin_all_gather(self, x: torch.Tensor, length: int) -> Pending:
        """Begin to gather the parts ``x`` [B, s, ...] of all ranks: [B, S, ...]."""
        parts = self.parts(length)
        missing = max(parts) - x.shape[1]
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x
        pending = self.exchange.all_gather(x, async_op=True)
        return lambda: _joined(pending(), parts)

    def begin_reduce_scatter(self, x: torch.Tensor) -> Pending:
        """Begin to sum every rank's ``x`` [B, S, ...]; each rank receives its part [B, s, ...]."""
        parts = self.parts(x.shape[1])
        pending = self.exchange.reduce_scatter(_cut(x, parts), async_op=True)
        return lambda: pending()[:, : parts[self.index]]


def _joined(pieces: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Return padded pieces [R, B, s, ...] as [B, S, ...]."""
    if min(parts) == max(parts):
        return pieces.movedim(0, 1).flatten(1, 2)
    return torch.cat([piece[:, :part] for piece, part in zip(pieces, parts, strict=True)], 1)


def _cut(x: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Return x [B, S, ...] as pieces [R, B, s, ...], padded to the longest."""
    if min(parts) == max(parts):
        even: torch.Tensor = x.unflatten(1, (len(parts), -1))  # type: ignore[no-untyped-call]
        return even.movedim(1, 0).contiguous()
    pieces = x.new_zeros(len(parts), len(x), max(parts), *x.shape[2:])
    for piece, part in zip(pieces, torch.split(x, [*parts], 1), strict=True):
        piece[:, : part.shape[1]] = part
    return pieces


class AllToAll(torch.autograd.Function):
    """Send rows of x [N, ...], so many to each rank, and receive so many; backward goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: Ranks, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        ctx.back = ranks, sent, received
        return ranks.begin_all_to_all(x, received, sent)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks, received, sent = ctx.back
        return ranks.begin_all_to_all(d_rows, received, sent)(), None, None, None


class Gather(torch.autograd.Function):
    """All-gather parts x [B, s, ...] to [B, S, ...] forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, length: int) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.begin_all_gather(x, length)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.begin_reduce_scatter(d_x)(), None, None
