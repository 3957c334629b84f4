"""One temporary folder for the files of a launcher and its ranks outside a run folder, with cleanup.

A launcher's scratch folder is ``nanotrain-*``, and multiprocessing's ``pymp-*``. If a launcher is killed,
nothing identifies their owner. They are therefore created in a folder of the launcher, which is locked until
its process ends: the next start deletes an unlocked one, and the semaphores named after it. Folders that are
locked, or belong to another user or host, are never touched: hosts may share the location, and locks and
process ids do not identify the processes of another host.

A second locked folder has notes of what else to delete with the launcher, such as snapshots in memory. It is
in the host's shared memory: a ``TMPDIR`` may be a job's own, and then no later start would find the notes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO

from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.folder_owner import is_alive
from nanotrain_core.watch.scratch import RankFile

PREFIX = "nanotrain-of-"
LOCK = ".lock"
#: Variable with the launcher's folder of notes, and the prefix of a note: a file with the path of a folder.
NOTES, TO_DELETE = "NANOTRAIN_NOTES", "delete-"
#: Where Linux stores named semaphores, and the same folder for all jobs of a host.
SEMAPHORES = Path("/dev/shm")
#: Longest path of a folder in which the name of a multiprocessing socket is still short enough for Linux.
LONGEST = 44

_held: list[IO[str]] = []
_notes: Path | None = None


def begin() -> None:
    """Delete the folders of launchers that are gone, and create those of this process and its ranks.

    They are deleted when this process ends. Done once per process; without effect if none can be created.
    """
    global _notes  # noqa: PLW0603 the temporary folder is a process's
    if _held:
        return
    place = Path(tempfile.gettempdir())
    sweep(place)
    sweep(SEMAPHORES)
    _notes = _create(SEMAPHORES) or _create(place)
    os.environ[NOTES] = str(_notes or "")
    folder = None if len(str(place)) > LONGEST else _create(place)
    if folder is None:
        return
    # torch's cache of compiled code is kept for later runs.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / f"torchinductor_{_user()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    own = multiprocessing.current_process()
    getattr(own, "_config", {})["semprefix"] = f"/{folder.name}"


def _create(place: Path) -> Path | None:
    """Create a locked folder that is deleted when this process ends, None if that is impossible."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix(), dir=place))
        _held.append(_lock(folder))
    except OSError:
        return None
    # After multiprocessing's own handler, which looks for its folder in ours.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
    return folder


def prefix() -> str:
    """Return the prefix of this host's folder names: of fixed length, and no prefix of another host's."""
    return f"{PREFIX}{hashlib.blake2s(socket.gethostname().encode(), digest_size=4).hexdigest()}-"


def sweep(place: Path, semaphores: Path = SEMAPHORES) -> None:
    """Delete the folders of launchers of this host that are gone, ranks included, and their semaphores."""
    for folder in place.glob(f"{prefix()}*"):
        with contextlib.suppress(OSError):
            if _is_left(folder):
                for name in semaphores.glob(f"sem.{folder.name}-*"):
                    name.unlink(missing_ok=True)
                _delete_named(folder)
                shutil.rmtree(folder, ignore_errors=True)


def delete_named() -> None:
    """Delete the folders that this launcher's ranks have requested to be deleted with it."""
    if _notes is not None:
        _delete_named(_notes)


def delete() -> None:
    """Delete this launcher's folders, and what its ranks have requested to be deleted with it."""
    delete_named()
    for lock in _held:
        shutil.rmtree(Path(lock.name).parent, ignore_errors=True)


def note(path: Path) -> None:
    """Request, on a rank, that a folder is deleted when the launcher ends or, if it is killed, later."""
    if os.environ.get(NOTES):
        name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        write_text_atomically(Path(os.environ[NOTES], f"{TO_DELETE}{name}"), str(path))


def _delete_named(notes: Path) -> None:
    for named in notes.glob(f"{TO_DELETE}*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(named.read_text(encoding="utf-8"), ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Return whether it is this user's and all its processes are gone; False without a lock: it is new."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is locked, or locks are unsupported
            return False
        ranks = (path.read_text() for path in folder.glob(f"*/{RankFile.PID.pattern}"))
        return not any(text.isdecimal() and is_alive(int(text)) for text in ranks)
    return False


def _lock(folder: Path) -> IO[str]:
    """Lock a folder before its lock becomes visible to others."""
    hidden = folder / f"{LOCK}-new"
    lock = hidden.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(folder / LOCK)
    return lock


def _user() -> str:
    """Return torch's name of the user in the name of its cache."""
    import getpass

    with contextlib.suppress(Exception):  # the user id may have no name
        return getpass.getuser()
    return f"uid_{os.getuid()}"
