"""The memory of this host and of the control groups of this process, as Linux reports them. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import attrs

#: Version 1 of control groups reports "no limit" as a number near 2**63.
NO_LIMIT = 2**60
#: Files with limit and use, and the row of ``memory.stat`` with the memory that the system can reclaim.
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
VERSION_2 = "memory.max", "memory.current", "inactive_file"


@attrs.define(frozen=True)
class GroupMemory:
    """A control group that has a limit. In bytes."""

    limit: int
    used: int | None
    """Memory used by its processes, including cached files; None if it is not reported."""
    cached: int = 0
    """Cached files, which the system reclaims when memory is short."""


@attrs.define(frozen=True)
class HostMemory:
    """The memory that the operating system reports, in bytes; None where it does not."""

    total: int | None = None
    available: int | None = None
    """Free memory, and memory that the system can reclaim."""
    swap: int = 0
    groups: tuple[GroupMemory, ...] = ()
    """The limits that hold for this process, innermost first: a container, or a job and its steps."""

    @property
    def tightest(self) -> GroupMemory | None:
        """The group with the lowest limit; None without any."""
        return min(self.groups, key=lambda group: group.limit, default=None)

    @property
    def most(self) -> int:
        """Maximum bytes that the processes of these groups can use, including swap space; 0 if unknown."""
        if self.total is None:
            return 0
        return min([self.total, *(group.limit for group in self.groups)]) + self.swap


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the host whose file system begins at ``root``. Nothing is raised.

    Where there is no ``/proc``, as on macOS, only the total is known.
    """
    table = dict(line.split(":", 1) for line in text_in(root / "proc/meminfo").splitlines() if ":" in line)
    total, available, swap = (_kib(table.get(key, "")) for key in ("MemTotal", "MemAvailable", "SwapTotal"))
    if total is None and root == Path("/"):
        total = _physical()
    groups = (_group(folder, two) for folder, two in control_groups("memory", root))
    return HostMemory(total, available, swap or 0, tuple(group for group in groups if group is not None))


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups, from its own to the outermost that is visible.

    Args:
        controller: ``memory`` or ``cpu``, which have hierarchies of their own in version 1.
        root: the beginning of the file system.

    Yields:
        The folder, and whether it is of version 2.
    """
    for line in text_in(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_dir():  # a container may see its own group as the top, under the host's path
                yield each, not controllers
            if each == top:
                break


def _group(folder: Path, two: bool) -> GroupMemory | None:
    limit_file, use_file, row = VERSION_2 if two else VERSION_1
    limit = number_in(folder / limit_file)
    if limit is None or limit >= NO_LIMIT:
        return None
    stat = dict(line.split(" ", 1) for line in text_in(folder / "memory.stat").splitlines() if " " in line)
    cached = stat.get(row, "0")
    return GroupMemory(limit, number_in(folder / use_file), int(cached) if cached.isdecimal() else 0)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _kib(text: str) -> int | None:
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else None


def number_in(path: Path) -> int | None:
    """Return the whole number in a file; None for another text, such as ``max``."""
    text = text_in(path)
    return int(text) if text.isdecimal() else None


def text_in(path: Path) -> str:
    """Return the text of a file of the system, without spaces around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
