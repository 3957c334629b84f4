"""What a container, a Slurm job or a systemd slice leaves of the machine: control groups, version 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nanotrain_doctor.findings import Finding, bad, good, note, size, warning

#: Version 1 says "no limit" with a number near 2**63.
NO_LIMIT = 2**60


def cores_here() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examine_container(root: Path = Path("/"), cores: int | None = None) -> list[Finding]:
    """Look at memory and cores, as limited by control groups below ``root``."""
    return [host_memory(root), cpu_quota(root, cores_here() if cores is None else cores)]


def host_memory(root: Path = Path("/")) -> Finding:
    """Judge how much memory is left, of the machine and of the control group."""
    table = dict(line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines() if ":" in line)
    total, available = (_kib(table.get(key, "")) for key in ("MemTotal", "MemAvailable"))
    limit, used = memory_limit(root)
    values = {"total": total, "available": available, "limit": limit, "used_of_limit": used}
    if total is None:
        return note("host memory", "this system does not tell", **values)
    left = available if available is not None else total
    text = f"{size(left)} free of {size(total)}"
    if limit is not None and limit < total:
        text = f"{text}, of which this control group may have {size(limit)}"
        text += f" and has {size(used)}" if used is not None else ""
        left = min(left, limit - (used or 0))
    if left < 2**30:
        remedy = "end what holds it, or ask for more (--mem of Slurm, resources.limits.memory of Kubernetes)"
        return bad("host memory", text, remedy, **values)
    if left < 0.1 * min(total, limit or total):
        return warning("host memory", text, "end what holds it: a rank out of memory is killed", **values)
    return good("host memory", text, **values)


def cpu_quota(root: Path = Path("/"), cores: int = 1) -> Finding:
    """Judge whether threads for every core would be stopped for having used up a quota of CPU time.

    Args:
        root: where ``/sys/fs/cgroup`` is.
        cores: that this process may run on, which ranks divide among themselves.
    """
    quota = cpu_limit(root)
    values = {"cores": cores, "quota": quota}
    if quota is None or quota >= cores:
        return good("CPU quota", f"none below the {cores} cores", **values)
    text = f"{quota:.3g} cores' time, on {cores} cores: as many threads are stopped in turn"
    remedy = (
        f"OMP_NUM_THREADS={max(1, int(quota))} divided by the ranks of this host; better whole cores (cpuset)"
    )
    return warning("CPU quota", text, remedy, **values)


def memory_limit(root: Path) -> tuple[int | None, int | None]:
    """Return the least limit of this process's groups, and what that group has, in bytes; None: no limit."""
    found: list[tuple[int, int | None]] = []
    for folder, two in _groups(root, "memory"):
        limit, used = (
            ("memory.max", "memory.current") if two else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        number = _number(folder / limit)
        if number is not None and number < NO_LIMIT:
            found.append((number, _number(folder / used)))
    return min(found, key=lambda pair: pair[0], default=(None, None))


def cpu_limit(root: Path) -> float | None:
    """Return how many cores' time this process's groups may have; None: no limit."""
    quotas = []
    for folder, two in _groups(root, "cpu"):
        if two:
            words = text_of(folder / "cpu.max").split()
            if len(words) == 2 and words[0].isdecimal():
                quotas.append(int(words[0]) / int(words[1]))
        else:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota is not None and period:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, whether of version 2) of the groups of this process, up to the mounted top."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_dir():
                yield each, not controllers
            if each == top:
                break


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() else None


def _kib(text: str) -> int | None:
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else None


def text_of(path: Path) -> str:
    """Return what a file of the system says, without spaces around it; nothing if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
