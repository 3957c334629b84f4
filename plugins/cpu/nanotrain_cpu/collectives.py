"""Small collectives through memory that the ranks of one host share, where gloo would wait for sockets.

Each rank writes its operand to a buffer that all ranks can read, waits at a barrier
(:mod:`nanotrain_cpu.barrier`), and reads what it needs from the buffers of all ranks. Two buffers are used in
turn: a rank that arrives at a barrier has read all that was written before the previous one, so the buffer
used before that is free. Tensors larger than a buffer are processed in pieces.

Every rank adds in the same order, so that results are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from nanotrain_core.api.models import outside_of_layers
from nanotrain_cpu.barrier import HostBarrier, Meeting, open_meeting
from nanotrain_cpu.shared_memory import add_up, map_for_all

#: Bytes of one buffer: what a core keeps in its second-level cache.
BUFFER = 2**20
#: Lengths for which views of the buffers are kept: a model has few, but numbers of routed tokens vary.
MOST_VIEWS = 256


class HostCollectives:
    """The collectives of one group of ranks on one host. Every member must call the same, in one order."""

    def __init__(self, buffers: Sequence[torch.Tensor], rank: int, meeting: Meeting) -> None:
        """``buffers``: two rows [2, BUFFER] of bytes for every rank."""
        self.buffers, self.rank, self.meeting = buffers, rank, meeting
        self._turn = 0
        self._rows: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        """Views of the buffers, by turn, length and dtype: each takes microseconds to make."""

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout: float) -> HostCollectives | None:
        """Return the collectives of a group, or None on every rank if they are not possible. Collective.

        They are not possible between hosts, without shared memory, and where torch.distributed checks every
        collective (``DebugLevel.DETAIL``), which it cannot do for these.

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

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``x``, [R, *x.shape]."""
        out = x.new_empty(len(self.buffers), *x.shape)
        for piece, begin, end in self._exchange(x.contiguous().view(-1)):
            for row, theirs in zip(out.view(len(out), -1), piece, strict=True):
                row[begin:end] = theirs
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``x``."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for piece, begin, end in self._exchange(x.contiguous().view(-1)):
            add_up(piece, out.view(-1)[begin:end])
        return out

    def all_reduce_sum_and_max(self, sums: torch.Tensor, most: torch.Tensor) -> bool:
        """All-reduce two vectors in place, ``sums`` by SUM and ``most`` by MAX, at one meeting.

        Returns:
            Whether that was possible: they are of one dtype, and together fit a buffer.
        """
        if sums.dtype != most.dtype or sums.nbytes + most.nbytes > BUFFER:
            return False
        count = sums.numel()
        rows = self._turn_of(count + most.numel(), sums.dtype)
        torch.cat([sums.reshape(-1), most.reshape(-1)], out=rows[self.rank])
        self.meeting.meet()
        both_RN = torch.stack(rows)
        sums.copy_(both_RN[:, :count].sum(0).view_as(sums))
        most.copy_(both_RN[:, count:].amax(0).view_as(most))
        return True

    def reduce_scatter(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``shares[r]``, r being this rank in the group.

        Args:
            shares: [R, ...], contiguous.
        """
        out = torch.empty_like(shares[0])
        flat = shares.view(len(shares), -1)
        width = max(1, BUFFER // max(1, shares.element_size() * len(shares)))
        for begin in range(0, flat.shape[1], width):
            part = flat[:, begin : begin + width]
            theirs = self._swap(part.contiguous().view(-1))
            add_up([each.view(part.shape)[self.rank] for each in theirs], out.view(-1)[begin : begin + width])
        return out

    def _exchange(self, flat: torch.Tensor) -> Iterator[tuple[list[torch.Tensor], int, int]]:
        """Yield, for consecutive pieces of ``flat``: the piece of every rank, its begin and its end."""
        width = BUFFER // flat.element_size()
        for begin in range(0, len(flat), width):
            end = min(begin + width, len(flat))
            yield self._swap(flat[begin:end]), begin, end

    def _swap(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``flat``, which must fit a buffer: views, valid until the second next swap."""
        rows = self._turn_of(flat.numel(), flat.dtype)
        rows[self.rank].copy_(flat)
        self.meeting.meet()
        return rows

    def _turn_of(self, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the beginning, ``count`` numbers, of every rank's buffer of the next turn."""
        self._turn = 1 - self._turn
        key = self._turn, count, dtype
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) == MOST_VIEWS:
                self._rows.clear()
            end = count * dtype.itemsize
            with outside_of_layers():  # a layer that is recomputed may find other views than before
                found = self._rows[key] = [buffer[self._turn, :end].view(dtype) for buffer in self.buffers]
        return found
