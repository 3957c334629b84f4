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
class ByteCounter:
    """Counts what is sent to other ranks."""

    sent: int = 0
    """Bytes sent since the beginning."""


@attrs.define(frozen=True)
class AllToAll:
    """An all-to-all of rows with uneven splits, in the group's rank order."""

    group: Exchange
    input_splits: list[int]
    """Rows that this rank sends to each rank of the group."""
    output_splits: list[int]
    """Rows that it receives from each."""
    rank: int
    """This rank's index in the group."""
    counter: ByteCounter

    def reversed(self) -> AllToAll:
        """Return the all-to-all that sends the received rows back."""
        return attrs.evolve(self, input_splits=self.output_splits, output_splits=self.input_splits)

    def run(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> torch.Tensor:
        """Send rows [N, D], grouped by destination; return those received [M, D], grouped by source."""
        return self.begin(rows, codec).wait()

    def begin(self, rows: torch.Tensor, codec: DispatchCodec | None = None) -> PendingAllToAll:
        """Begin :meth:`run`, without waiting for it; ``codec`` encodes what is sent."""
        encoded = (rows if codec is None else codec.encode(rows)).contiguous()
        received = encoded.new_empty(sum(self.output_splits), *encoded.shape[1:])
        to_others = sum(self.input_splits) - self.input_splits[self.rank]
        self.counter.sent += to_others * encoded.shape[1] * encoded.itemsize
        splits = self.output_splits, self.input_splits
        pending = self.group.all_to_all(received, encoded, *splits, async_op=True)
        return PendingAllToAll(pending, codec, rows.shape[1], rows.dtype)


@attrs.define(frozen=True, eq=False)
class PendingAllToAll:
    """An all-to-all in flight."""

    pending: Pending
    codec: DispatchCodec | None
    width: int
    dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        """Wait; return the received rows, grouped by source, decoded."""
        received = self.pending()
        return received if self.codec is None else self.codec.decode(received, self.width, self.dtype)


class OverlappedDispatch:
    """The dispatch of rows to their experts, overlapped with what is computed between begin and end.

    In backward the gradients' all-to-all, in the other direction, overlaps with the backward pass of the same
    computation: autograd's order is the reverse of forward's.
    """

    def __init__(self, all_to_all: AllToAll, codec: DispatchCodec | None = None) -> None:
        self.all_to_all, self.codec = all_to_all, codec
        self._pending: list[PendingAllToAll] = []

    def begin(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows [N, D]; return the input of :meth:`end`, which must not be read before."""
        handle: torch.Tensor = _BeginDispatch.apply(rows, self)  # type: ignore[no-untyped-call]
        return handle

    def end(self, handle: torch.Tensor) -> torch.Tensor:
        """Wait for the rows that others sent [M, D]. Backward: their gradients are sent back, unencoded."""
        rows: torch.Tensor = _EndDispatch.apply(handle, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, all_to_all: AllToAll, rows: torch.Tensor, codec: DispatchCodec | None) -> None:
        """Begin an all-to-all: of the rows, or in backward of their gradients."""
        self._pending.append(all_to_all.begin(rows, codec))

    def wait(self) -> torch.Tensor:
        """Wait for the last all-to-all begun and return its result."""
        return self._pending.pop().wait()


class _BeginDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, dispatch: OverlappedDispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        dispatch.start(dispatch.all_to_all, rows, dispatch.codec)
        received = sum(dispatch.all_to_all.output_splits)
        return rows.new_empty(()).expand(received, rows.shape[1])  # a shape without memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, handle: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.dispatch.wait(), None


class _EndDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, dispatch: OverlappedDispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        return dispatch.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.dispatch.start(ctx.dispatch.all_to_all.reversed(), d_rows, None)
        return d_rows.new_empty(()).expand_as(d_rows), None


def dispatch_rows(
    rows: torch.Tensor, all_to_all: AllToAll, codec: DispatchCodec | None = None
) -> torch.Tensor:
    """Send rows [N, D] to their experts. Backward: their gradients come back, unencoded."""
    dispatch = OverlappedDispatch(all_to_all, codec)
    return dispatch.end(dispatch.begin(rows))


def combine_rows(
    rows: torch.Tensor,
    all_to_all: AllToAll,
    codec: DispatchCodec | None = None,
    anchor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send experts' outputs [N, D] back, unencoded. Backward: their gradients are sent to the experts.

    Args:
        rows: outputs, grouped by destination.
        all_to_all: that of the dispatch, reversed.
        codec: for the gradients.
        anchor: a tensor that needs a gradient on every rank of the group, or on none. Experts without rows
            may return zeros that no gradient flows through; backward must still take part.
    """
    returned: torch.Tensor = _Combine.apply(rows, anchor, all_to_all, codec)  # type: ignore[no-untyped-call]
    return returned


class _Combine(torch.autograd.Function):
    """All-to-all in forward, the reverse all-to-all in backward, even if no gradient is needed here."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        all_to_all: AllToAll,
        codec: DispatchCodec | None,
    ) -> torch.Tensor:
        ctx.all_to_all, ctx.codec = all_to_all, codec
        return all_to_all.run(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.all_to_all.reversed().run(d_rows, ctx.codec), None, None, None


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
