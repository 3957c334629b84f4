"""Rows that change places between ranks, and within a rank, and whose gradients take the way back.

Shapes: N rows of width D.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nanotrain_core.routing import DispatchCodec


@attrs.define(frozen=True)
class Route:
    """How many rows this rank sends to each rank of a group, and gets from it, in the group's order."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def reversed(self) -> Route:
        """Return the way back."""
        return Route(self.group, self.received, self.sent)

    def send(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> torch.Tensor:
        """All-to-all: send rows, grouped by destination, and return those received, grouped by source."""
        wire = rows if codec is None else codec.encode(rows)
        arrived = wire.new_empty(sum(self.received), *wire.shape[1:])
        dist.all_to_all_single(arrived, wire.contiguous(), self.received, self.sent, group=self.group)
        return arrived if codec is None else codec.decode(arrived, rows.shape[1], rows.dtype)


def to_experts(rows: torch.Tensor, route: Route, codec: DispatchCodec | None = None) -> torch.Tensor:
    """Send rows [N, D] to where experts are. Backward: their gradients come back, unencoded."""
    arrived: torch.Tensor = _Exchange.apply(rows, None, route, codec, None)  # type: ignore[no-untyped-call]
    return arrived


def from_experts(
    rows: torch.Tensor, route: Route, codec: DispatchCodec | None = None, anchor: torch.Tensor | None = None
) -> torch.Tensor:
    """Send results [N, D] back, unencoded. Backward: their gradients go to the experts.

    Args:
        rows: results, grouped by destination.
        route: the way back.
        codec: for the gradients.
        anchor: a tensor that needs a gradient on every rank of the group, or on none. Experts without a
            single row may return zeros that no gradient flows through; backward must still take part.
    """
    returned: torch.Tensor = _Exchange.apply(rows, anchor, route, None, codec)  # type: ignore[no-untyped-call]
    return returned


class _Exchange(torch.autograd.Function):
    """All-to-all in forward, the reverse all-to-all in backward, whoever needs the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        route: Route,
        codec: DispatchCodec | None,
        backward_codec: DispatchCodec | None,
    ) -> torch.Tensor:
        ctx.route, ctx.codec = route, backward_codec
        return route.send(rows, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.route.reversed().send(d_rows, ctx.codec), None, None, None, None


class Permute(torch.autograd.Function):
    """``rows[order]`` in forward, ``rows[inverse]`` in backward: no additions, so no atomics either."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return d_rows.index_select(0, ctx.inverse), None, None
