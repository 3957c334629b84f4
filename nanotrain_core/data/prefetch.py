"""Prefetching of batches in a thread, which changes no batch and no position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import attrs

from nanotrain_core.batch import Batch, Shard


@attrs.define(frozen=True)
class Request:
    """The rows of a global batch: everything that determines what is read."""

    position: int
    """Position of its first sequence, in the endless stream of epochs."""
    sequences: int
    shard: Shard
    length: int


class ReadAhead:
    """Prefetches the next batches, assuming that steps continue as before."""

    def __init__(self, read: Callable[[Request], Batch], depth: int) -> None:
        """Read ``depth`` batches ahead with ``read``, which one thread calls in addition to the caller."""
        self._read, self._depth = read, depth
        self._coming: deque[tuple[Request, Future[Batch]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanotrain-data")

    def take(self, wanted: Request, following: Iterable[Request]) -> Batch:
        """Return a batch, and begin to read those that are expected to follow it.

        Raises:
            Exception: raised by reading this batch; errors of batches that are never requested are dropped.
        """
        if not self._coming or self._coming[0][0] != wanted:
            self.clear()
            batch = self._read(wanted)
        else:
            batch = self._coming.popleft()[1].result()
        for request, _ in zip(following, range(self._depth), strict=False):
            if len(self._coming) < self._depth and request not in [known for known, _ in self._coming]:
                self._coming.append((request, self._thread.submit(self._read, request)))
        return batch

    def clear(self) -> None:
        """Discard prefetched batches, and return once nothing is being read."""
        for _, future in self._coming:
            future.cancel()
        wait([future for _, future in self._coming])
        self._coming.clear()
