"""Rows that change places between ranks, and within a rank, and whose gradients take the way back.

Shapes: N rows of width D.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import DispatchCodec, Exchange, Pending


@attrs.define
class Traffic:
    """Counts bytes."""

    sent: int = 0
    """To other ranks, since the beginning."""


@attrs.define(frozen=True)
class Route:
    """How many rows this rank sends to each rank of a group, and gets from it, in the group's order."""

    group: Exchange
    sent: list[int]
    received: list[int]
    own: int
    """This rank, in that order."""
    traffic: Traffic

    def reversed(self) -> Route:
        """Return the way back."""
        return attrs.evolve(self, sent=self.received, received=self.sent)

    def send(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> torch.Tensor:
        """All-to-all: send rows, grouped by destination, and return those received, grouped by source."""
        return self.begin(rows, codec).arrived()

    def begin(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> Sent:
        """Send rows and go on."""
        wire = (rows if codec is None else codec.encode(rows)).contiguous()
        coming = wire.new_empty(sum(self.received), *wire.shape[1:])
        self.traffic.sent += (sum(self.sent) - self.sent[self.own]) * wire.shape[1] * wire.itemsize
        pending = self.group.all_to_all(coming, wire, self.received, self.sent, async_op=True)
        return Sent(pending, codec, rows.shape[1], rows.dtype)


@attrs.define(frozen=True, eq=False)
class Sent:
    """An all-to-all under way."""

    pending: Pending
    codec: DispatchCodec | None
    width: int
    dtype: torch.dtype

    def arrived(self) -> torch.Tensor:
        """Wait; return the rows received, grouped by source."""
        coming = self.pending()
        return coming if self.codec is None else self.codec.decode(coming, self.width, self.dtype)


class Flight:
    """Rows on their way to experts, in backward their gradients on the way back: sent, not yet awaited."""

    def __init__(self, route: Route, codec: DispatchCodec | None = None) -> None:
        self.route, self.codec = route, codec
        self._sent: list[Sent] = []

    def depart(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows [N, D]; return what :meth:`arrive` takes, which nobody may read before."""
        handle: torch.Tensor = _Depart.apply(rows, self)  # type: ignore[no-untyped-call]
        return handle

    def arrive(self, handle: torch.Tensor) -> torch.Tensor:
        """Wait for the rows that others sent [M, D]. Backward: their gradients go back, unencoded.

        What ran since :meth:`depart` runs backward while these gradients travel: autograd's order is the
        reverse of forward's.
        """
        rows: torch.Tensor = _Arrive.apply(handle, self)  # type: ignore[no-untyped-call]
        return rows

    def begin(self, route: Route, rows: torch.Tensor, codec: DispatchCodec | None) -> None:
        """Send without waiting."""
        self._sent.append(route.begin(rows, codec))

    def end(self) -> torch.Tensor:
        """Wait for what was begun last and return it."""
        return self._sent.pop().arrived()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.begin(flight.route, rows, flight.codec)
        return rows.new_empty(()).expand(sum(flight.route.received), rows.shape[1])  # a shape without memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, handle: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.flight.begin(ctx.flight.route.reversed(), d_rows, None)
        return d_rows.new_empty(()).expand_as(d_rows), None


def to_experts(rows: torch.Tensor, route: Route, codec: DispatchCodec | None = None) -> torch.Tensor:
    """Send rows [N, D] to where experts are. Backward: their gradients come back, unencoded."""
    flight = Flight(route, codec)
    return flight.arrive(flight.depart(rows))


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
    returned: torch.Tensor = _Return.apply(rows, anchor, route, codec)  # type: ignore[no-untyped-call]
    return returned


class _Return(torch.autograd.Function):
    """All-to-all in forward, the reverse all-to-all in backward, whoever needs the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        route: Route,
        codec: DispatchCodec | None,
    ) -> torch.Tensor:
        ctx.route, ctx.codec = route, codec
        return route.send(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.route.reversed().send(d_rows, ctx.codec), None, None, None


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
