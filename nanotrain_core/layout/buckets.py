"""Flat buckets of gradients and weights: the order in which they are sent, and their collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import nn

from nanotrain_core.errors import PluginError

if TYPE_CHECKING:
    from nanotrain_core.layout.exchange import Exchange

#: Waits for a collective in flight, and returns its result.
Pending = Callable[[], torch.Tensor]

#: Fills the given flat tensor with this rank's contribution to a bucket.
Write = Callable[[torch.Tensor], None]

#: Reduce-scatters in flight before the host waits for the first.
DEPTH = 2


class BucketExchange(Protocol):
    """Collectives of flat buckets with an equal range for each of the R ranks of a group, in rank order.

    Every method but :meth:`forget` is collective: all ranks call the same ones, in the same order.
    """

    limit: int
    """Maximum bytes of a bucket."""

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Begin to reduce-scatter a bucket into this rank's range; it is available after :meth:`drain`.

        Args:
            numel: elements in the bucket.
            write: called before this returns, with a flat tensor [numel] of the dtype of ``into``.
            into: this rank's range, flat [numel / R].
            add: accumulate into ``into`` instead of overwriting it.
        """
        ...

    def all_gather(self, whole: torch.Tensor) -> Pending | None:
        """Begin to all-gather ``whole``, a flat bucket in which this rank's own range is filled.

        Returns:
            A function that waits for it; None: it is available after :meth:`drain`.
        """
        ...

    def drain(self) -> None:
        """Return when all reduce-scatters in flight are done, and all-gathers without a wait function."""
        ...

    def forget(self) -> None:
        """Discard what an interrupted step has begun. Called on all ranks."""
        ...


class GroupBuckets(BucketExchange):
    """Uses a process group: a few reduce-scatters in flight, and overlapped all-gathers."""

    def __init__(self, exchange: Exchange, limit: int) -> None:
        self.exchange, self.limit = exchange, limit
        self._flying: deque[tuple[Pending, Callable[[], None]]] = deque()
        self._free: list[torch.Tensor] = []

    def reduce_scatter(self, numel: int, write: Write, into: torch.Tensor, *, add: bool) -> None:
        """Sum what arrives, in rank order, a few buckets later."""
        sent = self._acquire(numel, into)
        write(sent)
        received = self._acquire(self.exchange.rows_to_sum * len(into), into)

        def finish() -> None:
            first, *rest = received.view(-1, len(into))
            (into.add_ if add else into.copy_)(first)
            for each in rest:
                into.add_(each)
            self._free += (sent, received)

        shares = sent.view(self.exchange.size, -1)
        pending = self.exchange.reduce_scatter_into(received.view(-1, len(into)), shares, async_op=True)
        self._flying.append((pending, finish))
        while len(self._flying) > DEPTH:
            self._finish_one()

    def _finish_one(self) -> None:
        pending, finish = self._flying.popleft()
        pending()
        finish()

    def _acquire(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return an unused buffer with the dtype and device of ``like``."""
        for number, free in enumerate(self._free):
            if free.dtype == like.dtype and len(free) == length:
                return self._free.pop(number)
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def all_gather(self, whole: torch.Tensor) -> Pending:
        """All-gather in place."""
        rows = whole.view(self.exchange.size, -1)
        return self.exchange.all_gather_into(rows, rows[self.exchange.rank], async_op=True)

    def drain(self) -> None:
        """Wait for all reduce-scatters."""
        while self._flying:
            self._finish_one()

    def forget(self) -> None:
        """Discard all reduce-scatters."""
        self._flying.clear()


class HasParameters(Protocol):
    """A bucket, as far as its place in the queue depends on it."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters with gradients in this bucket."""
        ...


B = TypeVar("B", bound=HasParameters)


class BucketQueue(Generic[B]):
    """Buckets that are sent in a fixed order, each once the gradients of all its parameters have arrived.

    A complete bucket waits for those before it. All ranks therefore issue the same collectives in the same
    order, even if gradients arrive in different orders.
    """

    def __init__(self, buckets: Sequence[B], early: int | None = None) -> None:
        """Queue ``buckets`` in this order; a parameter may be in several of them.

        Args:
            buckets: hashable.
            early: only the first so many are :meth:`ready` before :meth:`rest` yields them; all by default.

        Raises:
            PluginError: a bucket is something else, such as a list of parameters.
        """
        for bucket in buckets:
            if not hasattr(bucket, "parameters") or type(bucket).__hash__ is None:
                text = "expected hashable objects that have parameters"
                raise PluginError(f"BucketQueue: a bucket is a {type(bucket).__name__}; {text}")
        self.buckets, self.early = buckets, len(buckets) if early is None else early
        self.buckets_of: dict[nn.Parameter, list[B]] = {}
        for bucket in buckets:
            for parameter in bucket.parameters:
                self.buckets_of.setdefault(parameter, []).append(bucket)
        self.rewind()

    def rewind(self) -> None:
        """Begin again: no gradient has arrived, and no bucket was sent."""
        self.sent = 0
        """How many buckets were sent."""
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}
        """Parameters of each bucket whose gradient has not arrived."""

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Return whether a bucket waits for the gradient of ``parameter``."""
        return any(parameter in self.missing[bucket] for bucket in self.buckets_of.get(parameter, ()))

    def arrived(self, parameter: nn.Parameter) -> None:
        """Record that the gradient of ``parameter`` is complete."""
        for bucket in self.buckets_of[parameter]:
            self.missing[bucket].discard(parameter)

    def ready(self) -> Iterator[B]:
        """Yield the next buckets in order, as far as they are complete."""
        while self.sent < self.early and not self.missing[self.buckets[self.sent]]:
            self.sent += 1
            yield self.buckets[self.sent - 1]

    def rest(self) -> Iterator[B]:
        """Yield all buckets that were not sent, complete or not, then begin again."""
        yield from self.buckets[self.sent :]
        self.rewind()
