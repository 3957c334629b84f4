"""Exchanges through memory that the ranks of one host share, in place of gloo's sockets.

Each rank writes where the others can read. An all-reduce takes two passes, as a ring all-reduce does:
rank r adds up the r-th chunk of everybody's buffer in its own, then everybody copies the summed chunks.
Nothing passes through the kernel, and since one rank adds each element, all end with the same bits.

:class:`SharedRing` has several small buffers and uses them in turn, so that a rank seldom waits for the
others: reduce-scatter and all-gather of large tensors go through it piece by piece, in cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

#: Where Linux keeps files that are only memory.
MEMORY = Path("/dev/shm")


class SharedBuffers:
    """One equal, flat buffer per rank of a group, each visible to all of them."""

    def __init__(self, buffers: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.buffers, self.group, self.rank = buffers, group, dist.get_rank(group)
        self.mine = buffers[self.rank]
        # chunks[owner][r]: the r-th chunk of that owner's buffer
        self.chunks = [buffer.tensor_split(len(buffers)) for buffer in buffers]

    @classmethod
    def open(cls, numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> SharedBuffers | None:
        """Return the group's buffers, or None on every rank if any rank cannot reach all of them.

        Collective over the group. Ranks on several hosts, or with too little memory to share, are told
        apart by trying. The files have no name any more when this returns, so nothing outlives the ranks.
        """
        size = max(1, numel) * dtype.itemsize
        ranks = dist.get_world_size(group)
        path = _create(size)
        paths: list[str | None] = [None] * ranks
        dist.all_gather_object(paths, path, group=group)
        maps = [_map(each, size) for each in paths]
        reached: list[bool] = [False] * ranks
        dist.all_gather_object(reached, None not in maps, group=group)
        if path is not None:
            os.unlink(path)
        if not all(reached):
            return None
        return cls([torch.frombuffer(each, dtype=dtype, count=numel) for each in maps if each], group)

    def all_reduce(self) -> None:
        """Sum everybody's buffer into everybody's buffer."""
        mine = self.chunks[self.rank]
        self._wait()  # everybody's buffer is full
        total = mine[self.rank]
        for rank, chunks in enumerate(self.chunks):
            if rank != self.rank:
                total.add_(chunks[self.rank])
        self._wait()  # every chunk is summed, by its owner
        for owner, chunks in enumerate(self.chunks):
            if owner != self.rank:
                mine[owner].copy_(chunks[owner])
        self._wait()  # nobody reads here any more

    def _wait(self) -> None:
        """Meet the other ranks of the group."""
        dist.all_reduce(torch.zeros(1), group=self.group)


#: Reads what all ranks wrote: it is given their buffers, of bytes, by rank.
Read = Callable[[Sequence[torch.Tensor]], None]


class SharedRing:
    """Three small buffers per rank, used in turn: what one rank writes, all read a turn later.

    A turn is :meth:`begin`, to write, and :meth:`send`. Ranks announce their k-th turn after they have
    read turn k - 1 and wait for turn k only when k + 1 is written. Once turn k is announced by all,
    nobody reads turn k - 1 any more: a third buffer is all it takes to write meanwhile.
    """

    TURNS = 3

    def __init__(self, turns: Sequence[SharedBuffers]) -> None:
        self.turns, self.group = turns, turns[0].group
        self._turn = 0
        self._flying: tuple[dist.Work, Read, SharedBuffers] | None = None

    @classmethod
    def open(cls, size: int, group: dist.ProcessGroup) -> SharedRing | None:
        """Return a ring of buffers of ``size`` bytes, or None on every rank. Collective over the group."""
        turns = [SharedBuffers.open(size, torch.uint8, group) for _ in range(cls.TURNS)]
        return cls([turn for turn in turns if turn]) if all(turns) else None

    def begin(self) -> torch.Tensor:
        """Return this rank's buffer [size] of the next turn, uint8, which nobody reads any more."""
        return self.turns[self._turn].mine

    def send(self, read: Read) -> None:
        """Announce what was written, and read what all wrote in the turn before. All ranks must call it.

        Args:
            read: called with everybody's buffers of this turn, when the next one is sent or at :meth:`drain`.
        """
        self.drain()
        token = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert token is not None
        self._flying = (token, read, self.turns[self._turn])
        self._turn = (self._turn + 1) % len(self.turns)

    def drain(self) -> None:
        """Read the last turn."""
        if self._flying is not None:
            (token, read, turn), self._flying = self._flying, None
            token.wait()
            read(turn.buffers)

    def forget(self) -> None:
        """Leave unread what a step that was broken off has sent."""
        self._flying = None


def reduce_scatter(buffers: Sequence[torch.Tensor], start: int, into: torch.Tensor, *, add: bool) -> None:
    """Sum a range, from element ``start`` on, of everybody's buffer, in the order of ranks.

    Args:
        buffers: of bytes, as a ring's reader gets them, that hold numbers of the dtype of ``into``.
        start: the first element.
        into: flat, as long as the range.
        add: to what ``into`` holds, in place of overwriting it.
    """
    ranges = [buffer.view(into.dtype)[start : start + len(into)] for buffer in buffers]
    if not add:
        torch.add(ranges[0], ranges[1], out=into)
        ranges = ranges[2:]
    for each in ranges:
        into.add_(each)


def all_gather(buffers: Sequence[torch.Tensor], into: torch.Tensor, rank: int) -> None:
    """Copy the first numbers of everybody's buffer but ``rank``'s, one after the other, to ``into``."""
    for owner, chunk in enumerate(into.tensor_split(len(buffers))):
        if owner != rank:
            chunk.copy_(buffers[owner].view(into.dtype)[: len(chunk)])


def _create(size: int) -> str | None:
    """Make a file of ``size`` bytes in memory that really are there; None if that cannot be had."""
    if not MEMORY.is_dir():
        return None
    descriptor, path = tempfile.mkstemp(prefix="nanotrain-", dir=MEMORY)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(descriptor)
    return path


def _map(path: str | None, size: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):
        if path is not None:
            with open(path, "r+b") as file:
                return mmap.mmap(file.fileno(), size)
    return None
