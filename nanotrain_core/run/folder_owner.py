"""The process that owns a run folder, and whether it is alive."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

#: Held by the launcher, or by rank 0 where the ranks were started by another launcher.
LOCK = ".lock"


def is_running(path: Path) -> bool:
    """Return whether the process that claimed ``path`` last is alive, as far as this host can tell.

    It is looked up by its process id: taking the lock, even briefly, could make a starting run fail.
    """
    try:
        owner = json.loads((path / LOCK).read_text(encoding="utf-8"))
        return owner["host"] == socket.gethostname() and is_alive(int(owner["pid"]))
    except (ArithmeticError, OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def is_alive(pid: int) -> bool:
    """Return whether a process with that id is running; a zombie is not."""
    try:
        os.kill(pid, 0)
        if not Path("/proc/self/stat").exists():  # a zombie cannot be detected otherwise
            return True
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):  # the second where it was reaped meanwhile
        return False
    return state not in "ZX"
