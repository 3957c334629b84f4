"""Which process owns a run folder, and whether it is there still."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

#: Held by the launcher, or by rank 0 of ranks that others started.
LOCK = ".lock"


def running(path: Path) -> bool:
    """Return whether the process that claimed ``path`` last is alive, as far as this host can tell.

    It is asked by its number: taking the lock, however shortly, could refuse it to a run that begins.
    """
    try:
        owner = json.loads((path / LOCK).read_text(encoding="utf-8"))
        return owner["host"] == socket.gethostname() and is_alive(int(owner["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_alive(pid: int) -> bool:
    """Return whether a process of that number runs: one that nobody has waited for, a zombie, does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):  # a system without /proc cannot tell
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state not in "ZX"
    return True
