"""One temporary folder for all that a launcher and its ranks leave beside a run, swept when they are gone.

torch's elastic agent makes ``torchelastic_*``, multiprocessing ``pymp-*``: whose they are, nobody can tell
once a launcher is killed. In a folder of the launcher's own, whose lock ends with its process, the next start
can, and deletes it and the semaphores named after it. What is locked, or of another user or host, is never
touched: hosts may share the place, and neither locks nor process numbers tell of another host's.
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

from nanotrain_core.run.owner import is_alive

PREFIX = "nanotrain-of-"
LOCK = ".lock"
#: How files in a launcher's scratch folder begin that name a folder elsewhere, to be deleted with it.
TO_DELETE = "delete-"
#: Where Linux keeps named semaphores.
SEMAPHORES = Path("/dev/shm")
#: Longest path of a folder in which a socket of multiprocessing still has a name that Linux takes.
LONGEST = 44

_held: IO[str] | None = None


def begin() -> None:
    """Sweep what launchers left that are gone, and have this process and its ranks use a folder of their own.

    It is theirs until this process ends. Once for a process; nothing where the folder cannot be made.
    """
    global _held  # noqa: PLW0603 the temporary folder is a process's
    if _held is not None:
        return
    place = Path(tempfile.gettempdir())
    sweep(place)
    if len(str(place)) > LONGEST:
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix(), dir=place))
        _held = _lock(folder)
    except OSError:
        return
    # torch's cache of compiled code is for later runs, too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / f"torchinductor_{_user()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    own = multiprocessing.current_process()
    getattr(own, "_config", {})["semprefix"] = f"/{folder.name}"
    # After multiprocessing's own, which looks for its folder in ours.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


def prefix() -> str:
    """Return how the names of this host's folders begin: of one length, and none begins another's."""
    return f"{PREFIX}{hashlib.blake2s(socket.gethostname().encode(), digest_size=4).hexdigest()}-"


def sweep(place: Path, semaphores: Path = SEMAPHORES) -> None:
    """Delete the folders of launchers of this host that are gone, ranks included, and their semaphores."""
    for folder in place.glob(f"{prefix()}*"):
        with contextlib.suppress(OSError):
            if _is_left(folder):
                for name in semaphores.glob(f"sem.{folder.name}-*"):
                    name.unlink(missing_ok=True)
                for scratch in folder.glob("*/"):
                    delete_named(scratch)
                shutil.rmtree(folder, ignore_errors=True)


def delete_named(scratch: Path) -> None:
    """Delete the folders that the ranks of a launcher have asked it to, now that it ends or is gone."""
    for named in scratch.glob(f"{TO_DELETE}*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(named.read_text(encoding="utf-8"), ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Return whether it is this user's, and no process of it lives. One without a lock is being made."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is held, or there are no locks
            return False
        ranks = (path.read_text() for path in folder.glob("*/pid-*"))
        return not any(text.isdecimal() and is_alive(int(text)) for text in ranks)
    return False


def _lock(folder: Path) -> IO[str]:
    """Lock a folder before anybody can see that it has a lock."""
    hidden = folder / f"{LOCK}-new"
    lock = hidden.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(folder / LOCK)
    return lock


def _user() -> str:
    """Return what torch calls the user in the name of its cache."""
    import getpass

    with contextlib.suppress(Exception):  # there may be no name for a number
        return getpass.getuser()
    return f"uid_{os.getuid()}"
