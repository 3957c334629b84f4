"""All-reduce through memory that the ranks of one host share, in place of gloo's sockets.

Each rank keeps its gradients in a buffer that the others can read. The sum takes two passes, as a
ring all-reduce does: rank r adds up the r-th chunk of everybody's buffer in its own, then everybody
copies the summed chunks. Nothing passes through the kernel, and since one rank adds each element, all
end with the same bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

#: Where Linux keeps files that are only memory.
MEMORY = Path("/dev/shm")


class SharedBuffers:
    """One equal, flat buffer per rank of a group, each visible to all of them."""

    def __init__(self, buffers: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
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
