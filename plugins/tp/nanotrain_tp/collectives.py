"""Collectives over the ranks that shard a layer, each with its conjugate as the backward pass.

A tensor outside the sharded layers is *whole* (every rank has all of it, and the same gradient) or a
*share* (each rank has its part of the sequence). Inside, every rank computes with different weights: its
gradient of a whole input is *partial*, and so is its part of a whole output.

Shapes: B batch, S sequence, D width, R ranks, s = S / R, rounded down or up: shares may differ by one. Only
    the tensors that are sent are padded then, and the padding is removed where they arrive.

Sources: f and g of Shoeybi et al., arXiv 1909.08053, section 3; their forms with sequence parallelism,
Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import Exchange, Mesh, Pending, shard_range


class SplitError(NanotrainError, ValueError):
    """A tensor cannot be split over this many ranks, or is not the expected share."""


class Ranks:
    """The ranks that shard a layer, and their collectives on plain tensors."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.size, self.index = mesh.size("tp"), mesh.coordinate("tp")

    @cached_property
    def exchange(self) -> Exchange:
        """The collectives of their group."""
        exchange = self.mesh.exchange("tp")
        assert exchange is not None, "tp = 1 has no collectives"
        return exchange

    @cached_property
    def in_background(self) -> bool:
        """Whether collectives overlap with this rank's computation."""
        return self.exchange.in_background

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of a whole ``x``, a view."""
        begin, end = shard_range(x.shape[dim], self.index, self.size)
        return x.narrow(dim, begin, end - begin)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``x``."""
        return self.begin_all_reduce(x, async_op=False)()

    def begin_all_reduce(self, x: torch.Tensor, *, async_op: bool = True) -> Pending:
        """Begin :meth:`all_reduce`; ``async_op``: without waiting for it."""
        return self.exchange.all_reduce(x, async_op=async_op)

    def all_gather(self, x: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """Return every rank's ``x``, concatenated along ``dim``.

        Args:
            x: this rank's share.
            dim: dimension of the shares.
            length: of the result along ``dim``; by default all shares have the length of this one.

        Raises:
            SplitError: ``x`` is not this rank's share of ``length``.
        """
        return self.begin_all_gather(x, dim, length, async_op=False)()

    def begin_all_gather(
        self, x: torch.Tensor, dim: int, length: int | None = None, *, async_op: bool = True
    ) -> Pending:
        """Begin :meth:`all_gather`; ``async_op``: without waiting for it."""
        dim %= x.dim()
        sizes = self.share_sizes(x, dim, length)
        x = _padded(x, dim, max(sizes))
        pending = self.exchange.all_gather(x, async_op=async_op)
        return lambda: _joined(pending(), dim, sizes)

    def share_sizes(self, x: torch.Tensor, dim: int, length: int | None) -> list[int]:
        """Return the size of each rank's share of ``length``, as :meth:`all_gather` takes it.

        Raises:
            SplitError: ``x`` is not this rank's share.
        """
        length = x.shape[dim] * self.size if length is None else length
        sizes = self.sizes(length)
        if x.shape[dim] != sizes[self.index]:
            raise SplitError(
                f"axis {dim} of {list(x.shape)} is not the share of {length} that rank {self.index} of tp = "
                f"{self.size} has, which is {sizes[self.index]}"
            )
        return sizes

    def sizes(self, length: int) -> list[int]:
        """Return how much of ``length`` each rank has; sizes differ by at most one."""
        shares = (shard_range(length, index, self.size) for index in range(self.size))
        return [end - begin for begin, end in shares]

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of the sum of every rank's ``x``."""
        return self.begin_reduce_scatter(x, dim, async_op=False)()

    def begin_reduce_scatter(self, x: torch.Tensor, dim: int, *, async_op: bool = True) -> Pending:
        """Begin :meth:`reduce_scatter`; ``async_op``: without waiting for it."""
        dim %= x.dim()
        sizes = self.sizes(x.shape[dim])
        shares, mine = _cut(x, dim, sizes), sizes[self.index]
        pending = self.exchange.reduce_scatter(shares, async_op=async_op)
        return lambda: _shortened(pending(), dim, mine)


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return ``x`` padded with zeros up to ``length`` along ``dim``."""
    missing = length - x.shape[dim]
    return x if not missing else F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def _shortened(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Undo :func:`_padded`."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()


def _joined(pieces: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Return padded pieces [R, ...] concatenated along ``dim``, each truncated to its size in ``sizes``."""
    if min(sizes) == max(sizes):
        return pieces.movedim(0, dim).flatten(dim, dim + 1)
    kept = [piece.narrow(dim, 0, size) for piece, size in zip(pieces, sizes, strict=True)]
    return torch.cat(kept, dim)


def _cut(x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Return pieces of ``sizes`` along ``dim``, each padded with zeros up to the largest: [R, ...]."""
    if min(sizes) == max(sizes):
        even: torch.Tensor = x.unflatten(dim, (len(sizes), sizes[0]))  # type: ignore[no-untyped-call]
        return even.movedim(dim, 0).contiguous()
    pieces: tuple[torch.Tensor, ...] = x.split(sizes, dim)  # type: ignore[no-untyped-call]
    return torch.stack([_padded(piece, dim, max(sizes)) for piece in pieces])


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward (f): a whole input enters sharded layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.all_reduce(d_x), None


class Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward (g): partial outputs leave sharded layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return d_x, None


class _AllGather(torch.autograd.Function):
    """All-gather forward. ``length``: of the result along ``dim``. ``known``: the result, if known."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int, length: int | None, known: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.all_gather(x, dim, length) if known is None else known.view_as(known)


class Gather(_AllGather):
    """All-gather forward, reduce-scatter backward: shares enter sharded layers."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.reduce_scatter(d_x, ctx.dim), None, None, None, None


class GatherWhole(_AllGather):
    """All-gather forward, own share backward: from shares to a computation that is the same on all ranks.

    Unlike after :class:`Gather`, every rank's gradient is already complete, and summing them would
    count it once for each rank.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.own(d_x, ctx.dim).contiguous(), None, None, None, None


class _ToShares(torch.autograd.Function):
    """All-gather backward."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.all_gather(d_x, ctx.dim, ctx.length), None, None


class Scatter(_ToShares):
    """Reduce-scatter forward, all-gather backward: partial outputs leave sharded layers as shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.length = ranks, dim, x.shape[dim]
        return ranks.reduce_scatter(x, dim)


class Slice(_ToShares):
    """Own share forward, all-gather backward: from whole to shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.length = ranks, dim, x.shape[dim]
        return ranks.own(x, dim).contiguous()
