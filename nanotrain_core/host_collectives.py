"""Small collectives through memory that the ranks of one host share, where gloo would wait for sockets.

Each rank writes its operand into a buffer that all can read, meets the others
(:mod:`nanotrain_core.host_barrier`), and takes what it needs from everybody's. Two buffers
are used in turn: whoever comes to a meeting has read what was written before the last one, so the
buffer of the last but one is free. Tensors larger than a buffer go through it in pieces.

A collective may be begun and awaited later: nothing goes on meanwhile, but ranks that come at different
times need not wait for one another. What is begun next reads it first.

Every rank adds in the order of ranks, so that all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from nanotrain_core.host_barrier import HostBarrier, Meeting, open_meeting
from nanotrain_core.shared_memory import add_up, map_for_all

#: Bytes of one buffer: what a core keeps in its second-level cache.
BUFFER = 2**20

#: Reads what all ranks wrote, by rank, each in the shape in which this one wrote.
Read = Callable[[list[torch.Tensor]], None]
#: Waits for a collective that was begun, and returns its result.
Pending = Callable[[], torch.Tensor]


class HostCollectives:
    """The collectives of one group of ranks on one host. Every member must call the same, in one order."""

    def __init__(self, buffers: Sequence[torch.Tensor], rank: int, meeting: Meeting) -> None:
        """``buffers``: two rows [2, BUFFER] of bytes for every rank."""
        self.buffers, self.rank, self.meeting = buffers, rank, meeting
        self._turn = 0
        self._flying: tuple[Read, list[torch.Tensor]] | None = None

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout: float) -> HostCollectives | None:
        """Return the group's, or None on every rank if there are none. Collective over the group.

        There are none between hosts, without memory to share, and where torch.distributed checks every
        collective (``DebugLevel.DETAIL``), which it could not do for these.

        Args:
            group: on the CPU.
            timeout: seconds until a rank that did not come is given up.
        """
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            return None
        ranks = dist.get_world_size(group)
        maps = map_for_all(2 * BUFFER + HostBarrier.size(ranks), group)
        if maps is None:
            return None
        meeting = open_meeting(maps[0], 2 * BUFFER, group, timeout)
        rows = [torch.frombuffer(each, dtype=torch.uint8, count=2 * BUFFER).view(2, BUFFER) for each in maps]
        return cls(rows, dist.get_rank(group), meeting)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return every rank's ``x``, stacked along a new axis ``dim``."""
        out = x.new_empty(*x.shape[:dim], len(self.buffers), *x.shape[dim:])
        rows = out.unbind(dim)
        if self._fits(x):
            self._send(x, partial(_copy, rows))
            return self._end(out)
        stacked = x.new_empty(len(rows), x.numel())
        for piece, at in self._pieces(x.reshape(1, -1)):
            self._send(piece[0], partial(_copy, stacked[:, at].unbind()))
        _copy(rows, self._end(stacked).view(len(rows), *x.shape).unbind())
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``x``."""
        return self.begin_all_reduce(x)()

    def begin_all_reduce(self, x: torch.Tensor) -> Pending:
        """Begin :meth:`all_reduce`; ``x`` may change meanwhile."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self._fits(x):
            self._send(x, partial(add_up, out=out))
        else:
            for piece, at in self._pieces(x.reshape(1, -1)):
                self._send(piece[0], partial(add_up, out=out.view(-1)[at]))
        return partial(self._end, out)

    def reduce_scatter(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``shares[r]``, r being this rank in the group.

        Args:
            shares: [R, ...].
        """
        return self.begin_reduce_scatter(shares)()

    def begin_reduce_scatter(self, shares: torch.Tensor) -> Pending:
        """Begin :meth:`reduce_scatter`; ``shares`` may change meanwhile."""
        out = torch.empty_like(shares[0], memory_format=torch.contiguous_format)
        if self._fits(shares):
            self._send(shares, partial(self._add_mine, out))
        else:
            for piece, at in self._pieces(shares.reshape(len(shares), -1)):
                self._send(piece, partial(self._add_mine, out.view(-1)[at]))
        return partial(self._end, out)

    def _add_mine(self, out: torch.Tensor, theirs: list[torch.Tensor]) -> None:
        add_up([shares[self.rank] for shares in theirs], out)

    def _end(self, out: torch.Tensor) -> torch.Tensor:
        self._drain()
        return out

    @staticmethod
    def _fits(x: torch.Tensor) -> bool:
        return x.numel() * x.element_size() <= BUFFER

    @staticmethod
    def _pieces(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield columns of ``rows`` [.., N] that fit a buffer, with where they are."""
        width = max(1, BUFFER // (rows.element_size() * len(rows)))
        for begin in range(0, rows.shape[1], width):
            at = slice(begin, begin + width)
            yield rows[:, at], at

    def _send(self, x: torch.Tensor, read: Read) -> None:
        """Write ``x``, which fits a buffer, and announce it; first read what was sent before."""
        self._drain()
        bytes_used = x.numel() * x.element_size()
        rows = [buffer[self._turn, :bytes_used].view(x.dtype).view(x.shape) for buffer in self.buffers]
        self._turn = 1 - self._turn
        rows[self.rank].copy_(x)
        self.meeting.announce()
        self._flying = (read, rows)

    def _drain(self) -> None:
        """Read what all sent last, when it is there."""
        if self._flying is not None:
            (read, rows), self._flying = self._flying, None
            self.meeting.wait()
            read(rows)


def _copy(rows: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for row, each in zip(rows, theirs, strict=True):
        row.copy_(each)
