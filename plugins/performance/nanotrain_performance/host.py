"""Memory of this process and of its host, as the operating system counts it. Torch-free."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import attrs

from nanotrain_core.api import host_memory

PAGE = resource.getpagesize()
STATM = "/proc/self/statm"


@attrs.define(frozen=True)
class Resident:
    """Bytes of this process in memory."""

    total: int
    own: int
    """Without pages of files, and without memory shared with other processes: reading data through a
    memory-mapped file is not growth of the program."""


class Statm:
    """The kernel's counts of this process's pages. Their file stays open: a reading is one system call."""

    def __init__(self) -> None:
        self._file = open(STATM, "rb", buffering=0) if os.path.exists(STATM) else None  # noqa: SIM115

    def read(self) -> Resident | None:
        """Return what is in memory now; None where the operating system does not tell."""
        if self._file is None:
            return None
        _, total, shared, *_ = os.pread(self._file.fileno(), 256, 0).split()
        return Resident(int(total) * PAGE, (int(total) - int(shared)) * PAGE)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def peak() -> int:
    """Return the most bytes of this process that were in memory so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def share_in_use(root: Path = Path("/")) -> float | None:
    """Return the fraction of memory in use, of the host or of a control group's limit: the larger one.

    Memory that the system would give back, such as cached files, counts as free. None if nothing is known.
    """
    memory = host_memory(root)
    shares = [(g.used - g.cached) / g.limit for g in memory.groups if g.used is not None and g.limit]
    if memory.total and memory.available is not None:
        shares.append(1 - memory.available / memory.total)
    return max(shares, default=None)
