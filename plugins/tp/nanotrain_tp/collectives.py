"""Collectives over the ranks that share a layer, each with its conjugate as the backward pass.

A tensor outside the split layers is *whole* (every rank has all of it, and the same gradient) or a
*share* (each rank has its part of the sequence). Inside, every rank computes with other weights: its
gradient of a whole input is *partial*, and so is its part of a whole output.

Shapes: B batch, S sequence, D width, R ranks, s = S / R.

Sources: f and g of Shoeybi et al., arXiv 1909.08053, section 3; their forms with sequence parallelism,
Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.buckets import Pending
from nanotrain_core.layout.exchange import Exchange
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.recipe.divisibility import either, multiples_near


class SplitError(NanotrainError, ValueError):
    """Something does not divide by the number of ranks that share it."""


class Ranks:
    """The ranks that share a layer, and what they do with plain tensors."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.size, self.index = mesh.size("tp"), mesh.coordinate("tp")

    @cached_property
    def exchange(self) -> Exchange:
        """Their collectives."""
        exchange = self.mesh.exchange("tp")
        assert exchange is not None, "tp = 1 has no collectives"
        return exchange

    @cached_property
    def in_background(self) -> bool:
        """Whether a collective goes on while this rank computes."""
        return self.exchange.in_background

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of a whole ``x``, a view.

        Raises:
            SplitError: it does not divide along ``dim``.
        """
        length = self._share_of(x, dim)
        return x.narrow(dim, self.index * length, length)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``x``."""
        return self.begin_all_reduce(x, go_on=False)()

    def begin_all_reduce(self, x: torch.Tensor, *, go_on: bool = True) -> Pending:
        """Begin :meth:`all_reduce`; ``go_on``: without waiting for it."""
        return self.exchange.all_reduce(x, async_op=go_on)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return every rank's ``x``, one after the other along ``dim``."""
        dim %= x.dim()
        return self.begin_all_gather(x, dim, go_on=False)()

    def begin_all_gather(self, x: torch.Tensor, dim: int, *, go_on: bool = True) -> Pending:
        """Begin :meth:`all_gather`; ``go_on``: without waiting for it."""
        pending = self.exchange.all_gather(x, async_op=go_on)
        return lambda: pending().movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of the sum of every rank's ``x``.

        Raises:
            SplitError: it does not divide along ``dim``.
        """
        return self.begin_reduce_scatter(x, dim, go_on=False)()

    def begin_reduce_scatter(self, x: torch.Tensor, dim: int, *, go_on: bool = True) -> Pending:
        """Begin :meth:`reduce_scatter`; ``go_on``: without waiting for it."""
        shares = x.unflatten(dim, (self.size, self._share_of(x, dim))).movedim(dim, 0)  # type: ignore[no-untyped-call]
        return self.exchange.reduce_scatter(shares.contiguous(), async_op=go_on)

    def _share_of(self, x: torch.Tensor, dim: int) -> int:
        length = x.shape[dim]
        if length % self.size:
            raise SplitError(
                f"axis {dim} of {list(x.shape)} does not divide by tp = {self.size}; "
                f"nearest lengths that do: {either(multiples_near(length, self.size))}"
            )
        return length // self.size


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward (f): a whole input enters split layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.all_reduce(d_x), None


class Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward (g): partial outputs leave split layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return d_x, None


class _AllGather(torch.autograd.Function):
    """All-gather forward. ``known``: the result, where ``x`` was gathered before."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int, known: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.all_gather(x, dim) if known is None else known.view_as(known)


class Gather(_AllGather):
    """All-gather forward, reduce-scatter backward: shares enter split layers."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.reduce_scatter(d_x, ctx.dim), None, None, None


class GatherWhole(_AllGather):
    """All-gather forward, own share backward: from shares to what every rank then treats alike.

    Unlike after :class:`Gather`, every rank's gradient is complete already, and adding them up would
    count it once for each rank.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.own(d_x, ctx.dim).contiguous(), None, None, None


class _ToShares(torch.autograd.Function):
    """All-gather backward."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.all_gather(d_x, ctx.dim), None, None


class Scatter(_ToShares):
    """Reduce-scatter forward, all-gather backward: partial outputs leave split layers as shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.reduce_scatter(x, dim)


class Slice(_ToShares):
    """Own share forward, all-gather backward: from what is whole to shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.own(x, dim).contiguous()
