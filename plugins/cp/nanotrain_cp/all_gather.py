"""All-gathered keys and values: each rank attends with all heads, for as many tokens as the others.

A token attends to those before it, so the last rank's part of a sequence would take most of the computation.
Each part is therefore cut in two halves, and a rank computes the first half of its own part and the second
half of the part of the opposite rank, R - 1 - r: of the halves 0 to 2R - 1 in order, 2r and 2R - 1 - 2r. The
two of each rank make the same sum, and so the same computation. The opposite ranks exchange
these queries, and afterwards the outputs.

Shapes: R ranks, B batch, S sequence, s this rank's part of it, H query heads, G key and value heads, K and V
    size of a query and of a value.

Source: Llama 3, arXiv 2407.21783, section 3.3.2, where each rank has two chunks of a sequence and queries
stay; here parts of sequences are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import Pending
from nanotrain_cp.collectives import Ranks

Tensor = torch.Tensor


class Halves:
    """Which queries of sequences of one length a rank computes."""

    def __init__(self, ranks: Ranks, length: int) -> None:
        self.ranks, self.length = ranks, length
        self.opposite = ranks.size - 1 - ranks.index
        edges = ranks.edges(length)
        (begin, end), (first, last) = edges[ranks.index], edges[self.opposite]
        self.kept = -(-(end - begin) // 2)
        """Tokens of the first half; the second has none if the part has one token."""
        self.sent = end - begin - self.kept
        self.received = (last - first) // 2
        self.ends = begin + self.kept, last
        """One past the last token of both halves that this rank computes, and so of the keys they see."""

    def begin_swap(self, x: Tensor, received: int) -> Pending:
        """Begin to send x [B, n, ...] to the opposite rank, and to receive as many tokens."""
        received_rows, sent_rows = ([0] * self.ranks.size for _ in range(2))
        received_rows[self.opposite], sent_rows[self.opposite] = received, x.shape[1]
        pending = self.ranks.begin_all_to_all(x.transpose(0, 1), received_rows, sent_rows)
        return lambda: pending().transpose(0, 1)


def attend(
    ranks: Ranks, length: int, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Tensor:
    """Attend with all heads to all tokens; q [B, s, H, K], k, v [B, s, G, ...] and the result are parts."""
    halves = Halves(ranks, length)
    own, other = q[:, : halves.kept], q[:, halves.kept :]
    other, k, v = _Enter.apply(other, k, v, halves)  # type: ignore[no-untyped-call]
    computed = (
        _attend_until(end, attention, x, k, v, *more)
        for end, x in zip(halves.ends, (own, other), strict=True)
    )
    y: Tensor = _Leave.apply(*computed, halves)  # type: ignore[no-untyped-call]
    return y


def _attend_until(
    end: int, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Tensor:
    """Attend with queries that are the last before token ``end``."""
    if not q.shape[1]:
        return q.new_empty(*q.shape[:3], v.shape[3])
    until = (x[:, :end] if isinstance(x, Tensor) else x for x in more)  # of tensors: where documents begin
    return attention(q, k[:, :end], v[:, :end], *until)


class _Enter(torch.autograd.Function):
    """Swap queries with the opposite rank, and gather keys and values; backward sums the latter's gradients.

    One function for all, so that backward is run, and in the same order, also by ranks whose half is empty.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, halves: Halves) -> tuple[Tensor, ...]:
        ctx.halves = halves
        begun = [halves.begin_swap(q, halves.received)]
        begun += [halves.ranks.begin_all_gather(x, halves.length) for x in (k, v)]
        return tuple(pending() for pending in begun)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        halves = ctx.halves
        begun = [halves.begin_swap(d_q, halves.sent)]
        begun += [halves.ranks.begin_reduce_scatter(x) for x in (d_k, d_v)]
        return *(pending() for pending in begun), None


class _Leave(torch.autograd.Function):
    """Send outputs back to the opposite rank, and join this rank's halves."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, other: Tensor, halves: Halves) -> Tensor:
        ctx.halves = halves
        return torch.cat((own, halves.begin_swap(other, halves.sent)()), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        halves = ctx.halves
        return d_y[:, : halves.kept], halves.begin_swap(d_y[:, halves.kept :], halves.received)(), None
