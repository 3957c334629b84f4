"""All-to-all of rows between ranks, and permutation within a rank, with the reverse for gradients.

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
    """Bytes sent to other ranks since the beginning."""


@attrs.define(frozen=True)
class Route:
    """Row counts that this rank sends to and receives from each rank of a group, in the group's order."""

    group: Exchange
    sent: list[int]
    received: list[int]
    own: int
    """This rank's index in that order."""
    traffic: Traffic

    def reversed(self) -> Route:
        """Return the reverse route."""
        return attrs.evolve(self, sent=self.received, received=self.sent)

    def send(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> torch.Tensor:
        """All-to-all: send rows, grouped by destination, and return those received, grouped by source."""
        return self.begin(rows, codec).arrived()

    def begin(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> Sent:
        """Send rows without waiting."""
        wire = (rows if codec is None else codec.encode(rows)).contiguous()
        coming = wire.new_empty(sum(self.received), *wire.shape[1:])
        self.traffic.sent += (sum(self.sent) - self.sent[self.own]) * wire.shape[1] * wire.itemsize
        pending = self.group.all_to_all(coming, wire, self.received, self.sent, async_op=True)
        return Sent(pending, codec, rows.shape[1], rows.dtype)


@attrs.define(frozen=True, eq=False)
class Sent:
    """An all-to-all in flight."""

    pending: Pending
    codec: DispatchCodec | None
    width: int
    dtype: torch.dtype

    def arrived(self) -> torch.Tensor:
        """Wait; return the received rows, grouped by source."""
        coming = self.pending()
        return coming if self.codec is None else self.codec.decode(coming, self.width, self.dtype)


class Flight:
    """Rows in flight to experts, and their gradients in backward: sent, not yet awaited."""

    def __init__(self, route: Route, codec: DispatchCodec | None = None) -> None:
        self.route, self.codec = route, codec
        self._sent: list[Sent] = []

    def depart(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows [N, D]; return the input of :meth:`arrive`, which must not be read before."""
        handle: torch.Tensor = _Depart.apply(rows, self)  # type: ignore[no-untyped-call]
        return handle

    def arrive(self, handle: torch.Tensor) -> torch.Tensor:
        """Wait for the rows that others sent [M, D]. Backward: their gradients are sent back, unencoded.

        Computation since :meth:`depart` runs backward while these gradients are in flight: autograd's order
        is the reverse of forward's.
        """
        rows: torch.Tensor = _Arrive.apply(handle, self)  # type: ignore[no-untyped-call]
        return rows

    def begin(self, route: Route, rows: torch.Tensor, codec: DispatchCodec | None) -> None:
        """Send without waiting."""
        self._sent.append(route.begin(rows, codec))

    def end(self) -> torch.Tensor:
        """Wait for the last operation begun and return its result."""
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
    """Send rows [N, D] to their experts. Backward: their gradients come back, unencoded."""
    flight = Flight(route, codec)
    return flight.arrive(flight.depart(rows))


def from_experts(
    rows: torch.Tensor, route: Route, codec: DispatchCodec | None = None, anchor: torch.Tensor | None = None
) -> torch.Tensor:
    """Send results [N, D] back, unencoded. Backward: their gradients are sent to the experts.

    Args:
        rows: results, grouped by destination.
        route: the reverse route.
        codec: for the gradients.
        anchor: a tensor that needs a gradient on every rank of the group, or on none. Experts without rows
            may return zeros that no gradient flows through; backward must still take part.
    """
    returned: torch.Tensor = _Return.apply(rows, anchor, route, codec)  # type: ignore[no-untyped-call]
    return returned


class _Return(torch.autograd.Function):
    """All-to-all in forward, the reverse all-to-all in backward, even if no gradient is needed here."""

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
