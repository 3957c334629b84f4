"""Exchanges through memory that the ranks of one host share, in place of gloo's sockets.

Each rank writes where the others can read. An all-reduce takes two passes, as a ring all-reduce does:
rank r sums the r-th chunk of all buffers into its own, then every rank copies the summed chunks. No data
passes through the kernel, and since one rank sums each element, results are bitwise equal on all ranks.

:class:`SharedRing` has several small buffers and uses them in turn, so that a rank seldom waits for the
others: reduce-scatter and all-gather of large tensors go through it piece by piece, in cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import structlog
import torch
import torch.distributed as dist

from nanotrain_cpu.barrier import HostBarrier, Meeting, open_meeting

#: Where Linux keeps files that are only memory.
MEMORY = Path("/dev/shm")
#: Prefix of the names of these files, which are removed once all ranks have opened them.
PREFIX = "nanotrain-shared-"

#: Seconds within which a rank has locked the file that it created.
NEW = 60.0

log = structlog.get_logger("nanotrain.memory")
_told: list[str] = []
"""Ranks with too little memory, if that was logged: a process logs it once, not at every request."""


class SharedBuffers:
    """One equal, flat buffer per rank of a group, each visible to all of them."""

    def __init__(self, buffers: list[torch.Tensor], rank: int, meeting: Meeting) -> None:
        self.buffers, self.rank, self.meeting = buffers, rank, meeting
        self.mine = buffers[self.rank]
        # chunks[owner][r]: the r-th chunk of that owner's buffer
        self.chunks = [buffer.tensor_split(len(buffers)) for buffer in buffers]

    @classmethod
    def open(
        cls, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, timeout: float = 300.0
    ) -> SharedBuffers | None:
        """Return the group's buffers, or None on every rank if any rank cannot reach all of them.

        Collective over the group. ``timeout``: seconds until a rank that does not come is given up.
        """
        size = -(-max(1, numel) * dtype.itemsize // 64) * 64  # the barrier's memory begins at a cache line
        maps = map_for_all(size + HostBarrier.size(dist.get_world_size(group)), group)
        if maps is None:
            return None
        buffers = [torch.frombuffer(each, dtype=dtype, count=numel) for each in maps]
        return cls(buffers, dist.get_rank(group), open_meeting(maps[0], size, group, timeout))

    def all_reduce(self) -> None:
        """Sum everybody's buffer into everybody's buffer."""
        mine = self.chunks[self.rank]
        self.meeting.meet()  # everybody's buffer is full
        total = mine[self.rank]
        for rank, chunks in enumerate(self.chunks):
            if rank != self.rank:
                total.add_(chunks[self.rank])
        self.meeting.meet()  # every chunk is summed, by its owner
        for owner, chunks in enumerate(self.chunks):
            if owner != self.rank:
                mine[owner].copy_(chunks[owner])
        self.meeting.meet()  # nobody reads here any more


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
        self.turns, self.meeting = turns, turns[0].meeting
        self._turn = 0
        self._flying: tuple[Read, SharedBuffers] | None = None

    @classmethod
    def open(cls, size: int, group: dist.ProcessGroup, timeout: float = 300.0) -> SharedRing | None:
        """Return a ring of buffers of at least ``size`` bytes, or None on every rank. Collective."""
        size = -(-size // 64) * 64  # so that numbers of any dtype fill a buffer
        turns = [SharedBuffers.open(size, torch.uint8, group, timeout) for _ in range(cls.TURNS)]
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
        self.meeting.announce()
        self._flying = (read, self.turns[self._turn])
        self._turn = (self._turn + 1) % len(self.turns)

    def drain(self) -> None:
        """Read the last turn."""
        if self._flying is not None:
            (read, turn), self._flying = self._flying, None
            self.meeting.wait()
            read(turn.buffers)

    def forget(self) -> None:
        """Discard what an interrupted step has sent, without reading it. All ranks must call it."""
        if self._flying is not None:
            self._flying = (lambda _: None, self._flying[1])


def reduce_scatter(buffers: Sequence[torch.Tensor], start: int, into: torch.Tensor, *, add: bool) -> None:
    """Sum a range, from element ``start`` on, of everybody's buffer, in the order of ranks.

    Args:
        buffers: of bytes, as a ring's reader gets them, that hold numbers of the dtype of ``into``.
        start: the first element.
        into: flat, as long as the range.
        add: to what ``into`` holds, in place of overwriting it.
    """
    ranges = [buffer.view(into.dtype)[start : start + len(into)] for buffer in buffers]
    add_up([into, *ranges] if add else ranges, into)


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add two or more ``parts`` in their order, so that all ranks round alike; ``out`` may be the first."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def all_gather(buffers: Sequence[torch.Tensor], into: torch.Tensor, rank: int) -> None:
    """Copy the first numbers of everybody's buffer but ``rank``'s, one after the other, to ``into``."""
    for owner, chunk in enumerate(into.tensor_split(len(buffers))):
        if owner != rank:
            chunk.copy_(buffers[owner].view(into.dtype)[: len(chunk)])


def map_for_all(size: int, group: dist.ProcessGroup) -> list[mmap.mmap] | None:
    """Return ``size`` bytes of every rank of the group, by rank, that all of them can read and write.

    Returns None on every rank if any rank cannot map all of them, as with several hosts or too little memory;
    for too little memory, the group's first rank logs one warning. Collective. The files are unlinked when
    this returns, so that nothing outlives the ranks. :func:`sweep` deletes files of ranks that were killed
    before that.
    """
    file = _create(size)
    path = None if file is None else file.name
    paths: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(paths, path, group=group)
    if None in paths and dist.get_rank(group) == 0:
        without = [dist.get_global_rank(group, rank) for rank, each in enumerate(paths) if each is None]
        _tell_of_sockets(", ".join(map(str, without)), size)
    maps = [found for each in paths if (found := _map(each, size))]
    reached: list[bool] = [False] * len(paths)
    dist.all_gather_object(reached, len(maps) == len(paths), group=group)
    if file is not None:
        _remove(file)
    return maps if all(reached) else None


@cache  # once per process
def sweep(folder: Path) -> None:
    """Delete the files that killed ranks of this user have left in ``folder``.

    A rank holds a lock on its file until its process ends. A file without a lock was just created, or its
    rank is gone: it is deleted if it is more than a minute old.
    """
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > NEW:
                path.unlink()


def _tell_of_sockets(ranks: str, size: int) -> None:
    """Warn that exchanges will be slower than they could be."""
    if _told:
        return
    _told.append(ranks)
    log.warning(
        "too little memory to share: ranks of this host exchange through sockets, which is slower",
        ranks=ranks,
        wanted=size,
        folder=str(MEMORY),
    )


def _create(size: int) -> IO[bytes] | None:
    """Create a locked in-memory file with ``size`` bytes allocated; None if that is not possible."""
    if not MEMORY.is_dir():
        return None
    sweep(MEMORY)
    file = tempfile.NamedTemporaryFile(prefix=PREFIX, dir=MEMORY, delete=False)  # noqa: SIM115 the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        _remove(file)
        return None
    return file


def _remove(file: IO[bytes]) -> None:
    Path(file.name).unlink(missing_ok=True)
    file.close()


def _map(path: str | None, size: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):
        if path is not None:
            with open(path, "r+b") as file:
                return mmap.mmap(file.fileno(), size)
    return None
