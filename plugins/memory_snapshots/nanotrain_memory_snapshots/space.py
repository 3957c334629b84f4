"""Checks whether a host has enough memory for snapshots, before any is allocated. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nanotrain_core.api import host_memory

#: In-memory file systems.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
#: Fraction of the host's memory that is left to other processes.
LEFT = 0.05


def missing(folder: Path, nbytes: int, root: Path = Path("/")) -> str:
    """Return why ``nbytes`` more must not be allocated in ``folder``; empty if they may be, or are none.

    Restarted ranks find theirs there: nothing more is needed, however full the host is.
    """
    if not nbytes:
        return ""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if nbytes > free:
        return f"{free / 1e9:.2f} GB are free in {folder}"
    if file_system(folder, root) not in IN_MEMORY:
        return ""
    for available in _available(root):
        if nbytes > available:
            return f"{max(available, 0) / 1e9:.2f} GB of memory can be spared"
    return ""


def file_system(folder: Path, root: Path = Path("/")) -> str:
    """Return the file-system type of a folder, empty if the system does not report it."""
    try:
        lines = (root / "proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    mounts = [line.split() for line in lines]
    at = folder.resolve()
    within = [words for words in mounts if len(words) > 2 and at.is_relative_to(words[1])]
    return max(within, key=lambda words: len(words[1]))[2] if within else ""


def _available(root: Path) -> Iterator[float]:
    """Yield the available bytes of memory: of the host, and of each control group of this process."""
    memory = host_memory(root)
    if memory.total is not None and memory.available is not None:
        yield memory.available - LEFT * memory.total
    for group in memory.groups:
        if group.used is not None:
            yield (1 - LEFT) * group.limit - group.used + group.cached
