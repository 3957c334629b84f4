"""Checks whether a host has enough memory for snapshots, before any is allocated. Torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: In-memory file systems.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
#: Fraction of the host's memory that is left to other processes.
LEFT = 0.05
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def missing(folder: Path, nbytes: int) -> str:
    """Return why ``nbytes`` more must not be allocated in ``folder``; empty if they may be, or are none.

    Restarted ranks find theirs there: nothing more is needed, however full the host is.
    """
    if not nbytes:
        return ""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if nbytes > free:
        return f"{free / 1e9:.2f} GB are free in {folder}"
    if file_system(folder) not in IN_MEMORY:
        return ""
    for available in _available():
        if nbytes > available:
            return f"{max(available, 0) / 1e9:.2f} GB of memory can be spared"
    return ""


def file_system(folder: Path) -> str:
    """Return the file-system type of a folder, empty if the system does not report it."""
    try:
        lines = (PROC / "self" / "mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    mounts = [line.split() for line in lines]
    at = folder.resolve()
    within = [words for words in mounts if len(words) > 2 and at.is_relative_to(words[1])]
    return max(within, key=lambda words: len(words[1]))[2] if within else ""


def _available() -> Iterator[float]:
    """Yield the available bytes of memory: of the host, and of each control group of this process."""
    try:
        rows = (line.split() for line in (PROC / "meminfo").read_text(encoding="utf-8").splitlines())
        sizes = {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if len(row) > 1}
        yield sizes["MemAvailable"] - LEFT * sizes["MemTotal"]
    except (OSError, KeyError, ValueError):
        pass
    for folder, limit, use, cached in _groups():
        with contextlib.suppress(OSError, ValueError):  # not here, or no limit: "max"
            most, used = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, use))
            lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            stat = {row[0]: int(row[1]) for row in map(str.split, lines)}
            yield (1 - LEFT) * most - used + stat.get(cached, 0)  # files that were read are given back


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folders of this process's groups, with the names of limit, use, and what is given back.

    They are nested: of a job, a step and a task under Slurm. A container may see its own as the root.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = CGROUP / "memory" if controllers else CGROUP
            folder = top / path.lstrip("/")
            for each in (folder, *folder.parents):
                if controllers:
                    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                else:
                    names = "memory.max", "memory.current", "inactive_file"
                yield each, *names
                if each == top:
                    break
