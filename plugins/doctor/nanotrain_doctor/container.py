"""What a container, a Slurm job or a systemd slice leaves of the machine: control groups, version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

from nanotrain_core.api import control_groups, host_memory
from nanotrain_doctor.findings import Finding, bad, good, note, size, warning


def cores_here() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examine_container(root: Path = Path("/"), cores: int | None = None) -> list[Finding]:
    """Look at memory and cores, as limited by control groups below ``root``."""
    return [examine_memory(root), cpu_quota(root, cores_here() if cores is None else cores)]


def examine_memory(root: Path = Path("/")) -> Finding:
    """Judge how much memory is left, of the machine and of the control group."""
    memory = host_memory(root)
    group = memory.tightest
    total, available = memory.total, memory.available
    limit, used = (group.limit, group.used) if group is not None else (None, None)
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


def cpu_limit(root: Path) -> float | None:
    """Return how many cores' time this process's groups may have; None: no limit."""
    quotas = []
    for folder, two in control_groups("cpu", root):
        if two:
            words = text_of(folder / "cpu.max").split()
            if len(words) == 2 and words[0].isdecimal():
                quotas.append(int(words[0]) / int(words[1]))
        else:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota is not None and period:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() else None


def text_of(path: Path) -> str:
    """Return the text of a file of the system, without spaces around it; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
