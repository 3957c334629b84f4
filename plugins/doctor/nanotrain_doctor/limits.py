"""What the system lets one process, or one user, have."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

from nanotrain_doctor.container import text_of
from nanotrain_doctor.findings import Finding, bad, good, note, size, warning

#: ``resource.getrlimit``: (soft, hard), ``RLIM_INFINITY`` for none.
Limits = Callable[[int], tuple[int, int]]
#: Of memory that RDMA may register, in bytes: what a few connections of a rank take.
LOCKED = 256 * 2**20


def examine_limits(root: Path = Path("/"), limits: Limits = resource.getrlimit) -> list[Finding]:
    """Look at ``ulimit``. ``root`` is where ``/sys`` and ``/proc`` are."""
    return [open_files(limits), locked_memory(root, limits), processes(root, limits)]


def open_files(limits: Limits = resource.getrlimit) -> Finding:
    """Judge ``ulimit -n``: gloo opens connections to every peer, in every group."""
    soft, hard = limits(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= 4096:
        return good("open files", _count(soft), **values)
    room = hard == resource.RLIM_INFINITY or hard >= 4096
    raised = "ulimit -n 65536" if hard == resource.RLIM_INFINITY or hard >= 65536 else f"ulimit -n {hard}"
    remedy = (
        f"{raised} before the run"
        if room
        else "have nofile raised in /etc/security/limits.conf, or by LimitNOFILE, or --ulimit of Docker"
    )
    judged = bad if soft < 512 else warning
    return judged("open files", f"{soft} at most: ranks x groups x files may be more", remedy, **values)


def locked_memory(root: Path = Path("/"), limits: Limits = resource.getrlimit) -> Finding:
    """Judge ``ulimit -l``, which limits what an InfiniBand or RoCE card may read."""
    soft, hard = limits(resource.RLIMIT_MEMLOCK)
    cards = _entries(root / "sys/class/infiniband")
    values = {"soft": soft, "hard": hard, "rdma_devices": cards}
    if soft == resource.RLIM_INFINITY:
        return good("locked memory", "not limited", **values)
    if not cards:
        return good("locked memory", f"{size(soft)}, and no RDMA device needs more", **values)
    text = f"{size(soft)} with RDMA device {', '.join(cards)}, which reads memory that is locked"
    remedy = "have memlock set to unlimited in /etc/security/limits.conf, or --ulimit memlock=-1 of Docker"
    return (bad if soft < LOCKED else warning)("locked memory", text, remedy, **values)


def processes(root: Path = Path("/"), limits: Limits = resource.getrlimit) -> Finding:
    """Judge ``ulimit -u`` and the container's limit: threads of all ranks count."""
    soft, hard = limits(resource.RLIMIT_NPROC)
    values: dict[str, int | None] = {"soft": soft, "hard": hard, "container": None}
    held = [soft] if soft != resource.RLIM_INFINITY else []
    text = text_of(root / "sys/fs/cgroup/pids.max") or text_of(root / "sys/fs/cgroup/pids/pids.max")
    if text.isdecimal():
        values["container"] = int(text)
        held.append(int(text))
    if not held or min(held) >= 4096:
        return good("processes", _count(min(held, default=resource.RLIM_INFINITY)), **values)
    remedy = "have nproc raised in /etc/security/limits.conf, or the container's --pids-limit"
    judged = bad if min(held) < 512 else warning
    return judged("processes", f"{min(held)} processes and threads at most", remedy, **values)


def examine_load(load: float, cores: int) -> Finding:
    """Return whether other programs compute here: ``load`` is the load average of the last minute."""
    values = {"load": load, "cores": cores}
    if load > 0.5 * cores + 0.5:
        remedy = "wait, or read the rates below as a lower bound"
        return warning("load", f"{load:.1f} processes were running on {cores} cores", remedy, **values)
    return note("load", f"{load:.1f} processes on {cores} cores", **values)


def _count(limit: int) -> str:
    return "not limited" if limit == resource.RLIM_INFINITY else f"{limit} at most"


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
