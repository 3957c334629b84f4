"""Memory of this process and of its host, as the operating system counts it. Torch-free."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import attrs

PAGE = resource.getpagesize()
STATM = "/proc/self/statm"
MEMINFO = Path("/proc/meminfo")
#: Limit and use of a cgroup (version 2), relative to its folder.
LIMIT, USE = "memory.max", "memory.current"


@attrs.define(frozen=True)
class Resident:
    """Bytes of this process in memory."""

    total: int
    own: int
    """Without what is a file's, or shared with other processes: data that is read through a mapped file is no
    growth of the program."""


class Statm:
    """The kernel's counts of this process's pages, in a file that stays open: a look is one call."""

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


def share_in_use(meminfo: Path = MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the share in use of the host's memory, or of what the cgroup may have if that is more.

    Memory that the system would give back, as of files it keeps, counts as free.
    """
    shares: list[float] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        found = {name: int(rest.split()[0]) for name, rest in lines}
        shares.append(1 - found["MemAvailable"] / found["MemTotal"])
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = int(stat.get("inactive_file", 0))
        shares.append((int((cgroup / USE).read_text()) - free) / int((cgroup / LIMIT).read_text()))
    return max(shares, default=None)
