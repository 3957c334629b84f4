"""``/dev/shm``: NCCL's ranks of one host exchange through it, and so do data loaders."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanotrain_doctor.findings import Finding, bad, good, note, size, warning

#: Docker's default, in which NCCL's buffers of two ranks do not fit.
DOCKER = 64 * 2**20
#: Seconds in which whoever makes a file may not have mapped it yet.
NEW = 60.0
#: What a rank of NCCL, a worker of a data loader, or a rank that shares memory leaves when it is killed.
LITTER = re.compile(r"nccl-|torch_|sem\.|__KMP|psm_|cuda\.shm|nanotrain-shared-")


def examine_shared_memory(
    root: Path = Path("/"), statvfs: Callable[[Path], Any] = os.statvfs
) -> list[Finding]:
    """Look at its size and at what dead processes left there."""
    folder = root / "dev/shm"
    try:
        room = statvfs(folder)
    except OSError as problem:
        remedy = "mount it: mount -t tmpfs -o size=50% tmpfs /dev/shm"
        return [bad("/dev/shm", f"not there: {problem.strerror}", remedy)]
    return [shared_memory(room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail), litter(root)]


def shared_memory(total: int, free: int) -> Finding:
    """Judge size and free space, in bytes."""
    values = {"total": total, "free": free}
    text = f"{size(free)} free of {size(total)}"
    larger = (
        "--shm-size=16g of Docker, an emptyDir with medium Memory of Kubernetes, mount -o remount,size=16g"
    )
    if total <= DOCKER:
        return bad("/dev/shm", f"{text}: too little for NCCL's ranks of one host", larger, **values)
    if free <= DOCKER:
        return bad(
            "/dev/shm", f"{text}: full", f"remove what is there, or make it larger: {larger}", **values
        )
    if free < 2**30:
        return warning("/dev/shm", text, larger, **values)
    return good("/dev/shm", text, **values)


def litter(root: Path = Path("/"), user: int | None = None) -> Finding:
    """Find files of this user that no process maps or holds open: of ranks that were killed."""
    owner = os.getuid() if user is None else user
    found: dict[str, int] = {}
    used: set[str] | None = None
    for path in sorted((root / "dev/shm").glob("*")):
        try:
            about = path.stat()
        except OSError:  # it went away
            continue
        new = time.time() - about.st_mtime < NEW
        if new or about.st_uid != owner or not LITTER.match(path.name):
            continue
        used = set(_in_use(root / "proc")) if used is None else used
        if path.name not in used:
            found[path.name] = about.st_blocks * 512
    if not found:
        return good("litter in /dev/shm", "none of this user")
    held, count = sum(found.values()), f"{len(found)} file{'s' * (len(found) > 1)}"
    text = f"{count} with {size(held)} that no process has: {', '.join([*found][:3])}"
    if held < DOCKER:
        return note("litter in /dev/shm", text, files=found)
    return warning("litter in /dev/shm", text, "rm these files, which --json lists", files=found)


def _in_use(proc: Path) -> Iterator[str]:
    """Yield names in ``/dev/shm`` that some process, which this one may look at, has mapped or open."""
    for process in proc.glob("[0-9]*"):
        try:
            mapped = (process / "maps").read_text(encoding="utf-8", errors="replace")
            opened = "\n".join(os.readlink(link) for link in (process / "fd").iterdir())
        except OSError:
            continue
        yield from re.findall(r"/dev/shm/([^\s/]+)", f"{mapped}\n{opened}")
