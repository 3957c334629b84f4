"""What a container, a Slurm job or a systemd slice leaves of the machine: control groups, version 1 and 2."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.api import allowed_processors, cpu_quota, host_memory
from nanotrain_doctor.findings import Finding, bad, good, note, size, warning


def examine_container(root: Path = Path("/"), cores: int | None = None) -> list[Finding]:
    """Look at memory and cores, as limited by control groups below ``root``."""
    return [examine_memory(root), examine_quota(root, len(allowed_processors()) if cores is None else cores)]


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


def examine_quota(root: Path = Path("/"), cores: int = 1) -> Finding:
    """Judge whether programs that start a thread for every core are stopped for their quota of CPU time.

    Ranks divide the quota (:func:`~nanotrain_core.api.usable_processors`); other programs may not know it.

    Args:
        root: where ``/sys/fs/cgroup`` is.
        cores: that this process may run on, which ranks divide among themselves.
    """
    quota = cpu_quota(root)
    values = {"cores": cores, "quota": quota}
    if quota is None or quota >= cores:
        return good("CPU quota", f"none below the {cores} cores", **values)
    text = f"{quota:.3g} cores' time on {cores} cores: ranks divide it, and more threads are stopped in turn"
    remedy = "whole cores (cpuset) if a step's time varies; OMP_NUM_THREADS for programs that count cores"
    return warning("CPU quota", text, remedy, **values)


def text_of(path: Path) -> str:
    """Return the text of a file of the system, without spaces around it; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
