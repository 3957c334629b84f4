"""The location of a run's snapshots: a folder for each rank, named after the run's identity. Torch-free.

The identity is a random name in the run folder, with what must be unchanged for a snapshot to be usable.
It is new whenever a user starts a run, and unchanged when a launcher restarts the ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import attrs

from nanotrain_core.api import NanotrainError, write_text_atomically

#: A file of the run folder.
FILE = "memory-snapshots.json"
PREFIX = "nanotrain-snapshots-"
#: A file in each rank's folder.
LOCK = "lock"


@attrs.define(frozen=True)
class Identity:
    """The common properties of a run's snapshots."""

    name: str
    of: Mapping[str, str]
    """From ``Restore.identity``."""

    def differences(self, now: Mapping[str, str]) -> list[str]:
        """Return what has changed, in words."""
        return sorted(key for key in {*self.of, *now} if self.of.get(key) != now.get(key))


def new_identity(of: Mapping[str, str]) -> Identity:
    """Return an identity that no run had before."""
    return Identity(uuid.uuid4().hex, of)


def read_identity(run_folder: Path) -> Identity | None:
    """Return the identity of the run's last start; None if there is none that can be read."""
    try:
        found = json.loads((run_folder / FILE).read_text(encoding="utf-8"))
        name, of = found["name"], found["of"]
        if uuid.UUID(name).hex == name and isinstance(of, dict):
            return Identity(name, of)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def write_identity(run_folder: Path, identity: Identity) -> None:
    """Write it to the run folder."""
    run_folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(run_folder / FILE, json.dumps(attrs.asdict(identity), indent=1))


def folder_of(rank: int, identity: Identity, within: str) -> Path:
    """Return the folder of a rank."""
    return Path(within, f"{PREFIX}{identity.name}-{rank:05d}")


def make_folder(path: Path) -> None:
    """Create the folder of a rank, readable by no other user.

    Raises:
        NanotrainError: it cannot be created, or belongs to another user.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as problem:
        text = f"memory snapshots cannot be kept in {path.parent}: {problem.strerror}; expected a folder in "
        text += '[[monitor]] use = "memory_snapshots" that there is on this host, such as /dev/shm'
        raise NanotrainError(text) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NanotrainError(f"memory snapshots cannot be kept in {path}: it is somebody else's")


def folders_here(identity: Identity, within: str) -> Iterator[tuple[int, Path]]:
    """Yield the ranks whose folders are on this host, and the folders."""
    for path in sorted(Path(within).glob(f"{PREFIX}{identity.name}-*")):
        number = path.name.rpartition("-")[2]
        if number.isdecimal() and not path.is_symlink() and path.lstat().st_uid == os.getuid():
            yield int(number), path


def hold(path: Path) -> IO[str] | None:
    """Lock the folder of a rank until the file is closed or the process ends; None if there is no folder.

    The lock is shared: attempts in one process overlap.
    """
    with suppress(OSError):
        lock = open(path / LOCK, "a", encoding="utf-8")  # noqa: SIM115
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)  # at once, as nobody keeps it exclusively
        return lock
    return None


def forget(identity: Identity, within: str) -> bool:
    """Delete all snapshots of an identity on this host, unless a run holds them; return whether one does.

    A copy of a run folder has the identity of the original, which may be training. One rank of a host calls
    this: two would find each other's locks.
    """
    found = [path for _, path in folders_here(identity, within)]
    held = any(map(_is_held, found))
    for path in found if not held else ():
        shutil.rmtree(path, ignore_errors=True)
    return held


def _is_held(path: Path) -> bool:
    with suppress(FileNotFoundError), open(path / LOCK, encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
