"""The processors of this host that this process may use. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from nanotrain_core.run.host_memory import control_groups, number_in, text_in


def allowed_processors() -> frozenset[int]:
    """Return the numbers of the processors that this process may run on: its CPU affinity mask.

    Where the system has no such masks, as macOS, all processors.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' time this process's control groups may use; None without a limit.

    A container that may use 2.5 CPUs (``docker run --cpus``, ``resources.limits.cpu`` of Kubernetes) may run
    on every processor of its host, and all of its threads are stopped once they have used up that time.

    Args:
        root: the beginning of the file system.
    """
    quotas = []
    for folder, two in control_groups("cpu", root):
        if two:
            words = text_in(folder / "cpu.max").split()
            if len(words) == 2 and words[0].isdecimal():
                quotas.append(int(words[0]) / int(words[1]))
        else:
            quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
            if quota is not None and period:
                quotas.append(quota / period)
    return min(quotas, default=None)


def usable_processors(root: Path = Path("/")) -> int:
    """Return how many threads of this process can run at the same time, by affinity and quota; at least 1.

    Args:
        root: the beginning of the file system, where control groups are read.
    """
    quota = cpu_quota(root)
    allowed = len(allowed_processors())
    return allowed if quota is None else max(1, min(allowed, int(quota)))
