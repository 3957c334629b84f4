"""The run folder: allocated, locked by one run at a time, and released when the process ends."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import structlog
import tomli

from nanotrain_core.errors import FolderError, FolderLocked
from nanotrain_core.run import log
from nanotrain_core.run.folder_owner import LOCK
from nanotrain_core.run.stop import StopRequest
from nanotrain_core.watch.collectives import DUMPS

#: Shared lock of every rank: ranks may outlive a launcher by a second.
RANKS_LOCK = ".ranks"
#: Seconds that a claim waits for ranks that have lost their launcher to end. It takes them one or two, unless
#: a write to a slow disk or the teardown of many CUDA contexts keeps a process from ending.
PATIENCE = 30.0
#: Seconds of this wait after which it is logged.
SILENCE = 3.0
#: Consecutive checks that must find no folder, and the seconds between them: one may coincide with a remount.
LOOKS, BETWEEN = 3, 1.0


class RunFolder:
    """A claimed run folder. The claim ends with the process, however the process ends."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self.lock = path, lock

    @classmethod
    def claim(
        cls,
        name: str,
        *,
        folder: str | None = None,
        resume: bool = False,
        patience: float = 0.0,
        agents: Sequence[str] = (),
        after: str | None = None,
    ) -> RunFolder:
        """Claim the folder of a run.

        Args:
            name: of the run. Without ``folder``, a new run takes ``runs/<name>``, or ``runs/<name>-2``,
                ``-3`` and so on, the number after the highest; a resumed one takes the highest of these.
            folder: exactly this folder.
            resume: whether the folder may already contain a run.
            patience: seconds to wait for another owner to give it up.
            agents: of the launch, by which :func:`claimed_by` finds the folder again.
            after: what :meth:`owner` returned when it was last claimed, to go on without loading anything.

        Raises:
            FolderLocked: a live run owns it.
            FolderError: it cannot be written, or contains a run and ``resume`` is false, or was claimed by
                another run since ``after``.
        """
        path = Path(folder) if folder else newest(name) if resume else free(name)
        claimed = cls(path, _lock_within(path, patience))
        try:
            claimed._expect_own(resume, after)
        except FolderError:
            claimed.release()
            raise
        _write_owner(path, claimed.lock, agents)
        return claimed

    def _expect_own(self, resume: bool, after: str | None) -> None:
        """Refuse a folder with another run: see :meth:`claim`."""
        if not resume and holds_run(self.path):
            raise FolderError(
                f"{self.path} holds a run already: add --resume to go on with it, or name another folder"
            )
        if after is not None and self.owner() not in (after, ""):  # "": the folder was deleted
            raise FolderError(
                f"another run has used {self.path} since this one did: make a new engine, with resume='auto' "
                "to go on from its last checkpoint, or with another folder"
            )

    def release(self) -> None:
        """Give up the claim."""
        self.lock.close()

    def owner(self) -> str:
        """Return what the lock file says of the process that claimed the folder last.

        Raises:
            FolderError: it cannot be read.
        """
        try:
            with suppress(PermissionError):  # a lock on SMB excludes reading, but by what holds it
                return (self.path / LOCK).read_text(encoding="utf-8")
            return os.pread(self.lock.fileno(), 1 << 16, 0).decode()
        except OSError as problem:
            text = f"{self.path / LOCK} cannot be read: {problem.strerror}"
            raise FolderError(text) from problem


def holds_run(path: Path) -> bool:
    """Return whether a run has left any files in ``path``."""
    return path.is_dir() and any(entry.name not in (LOCK, RANKS_LOCK, DUMPS) for entry in path.iterdir())


def newest(name: str) -> Path:
    """Return the newest folder of a run called ``name``, or the path the first would have.

    An empty folder, such as that of a rejected run, does not hide earlier ones.
    """
    return next((path for _, path in reversed(_numbered(name)) if _is_used(path)), Path("runs") / name)


def free(name: str) -> Path:
    """Return the first folder for ``name`` after all that runs have used.

    If one of these was deleted, a run in its place would have a lower number than older ones.
    """
    last = max((number for number, path in _numbered(name) if _is_used(path)), default=0)
    numbers = count(last + 1)
    paths = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in numbers)
    return next(path for path in paths if not _is_used(path))


def claimed_by(agents: Collection[str], name: str, folder: str | None = None) -> Path | None:
    """Return the folder that a launch with any of these agents was the last to claim; None if there is none.

    Arguments are those of :meth:`RunFolder.claim`.
    """
    for path in [Path(folder)] if folder else [path for _, path in _numbered(name)]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            if {*agents} & {*json.loads((path / LOCK).read_text(encoding="utf-8"))["agents"]}:
                return path
    return None


def _numbered(name: str) -> list[tuple[int, Path]]:
    """Return the folders of runs called ``name`` with their numbers, the highest last."""
    first = Path("runs") / name
    found = [(1, first)]
    for path in first.parent.glob(f"{glob.escape(first.name)}-[1-9]*"):
        number = path.name.removeprefix(f"{first.name}-")
        if number.isdecimal() and number != "1" and not _has_other_name(path, name):
            found.append((int(number), path))
    return sorted(found)


def _has_other_name(path: Path, name: str) -> bool:
    """Return whether the run in ``path`` is called otherwise: ``gpt-2`` is not the second of ``gpt``."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return bool(tomli.loads((path / "recipe.toml").read_text(encoding="utf-8"))["run"]["name"] != name)
    return False


def _is_used(path: Path) -> bool:
    return holds_run(path) or _is_held(path / LOCK) or _is_held(path / RANKS_LOCK)


def _lock_within(path: Path, patience: float) -> IO[str]:
    """Lock a folder, waiting up to ``patience`` seconds for its owner to give it up."""
    until, said = time.monotonic() + patience, False
    while True:
        try:
            return _lock(path)
        except FolderLocked as problem:
            if time.monotonic() >= until:
                raise
            if not said:
                said = True
                log.say(f"{problem}; waiting up to {patience:g} seconds for it to end", level="warning")
        time.sleep(min(1.0, patience))


def _lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held until the process ends
    except OSError as problem:
        raise FolderError(f"the run folder {path} cannot be written: {problem.strerror}") from problem
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise FolderLocked(f"{path} is in use by another run: {_owner(lock.read())}") from None
    except OSError as problem:  # such as Lustre mounted without ``flock``
        log.ensure(0)
        text = "the file system has no locks: nothing keeps a second run out of the folder of this one"
        structlog.get_logger().warning(text, folder=str(path), problem=problem.strerror)
    if not _ranks_end(path, PATIENCE):
        lock.close()
        raise FolderLocked(f"{path} is in use: ranks of a run that has lost its launcher are still ending")
    return lock


def _write_owner(path: Path, lock: IO[str], agents: Sequence[str]) -> None:
    owner: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "agents": [*agents]}
    owner["start"] = time.strftime("%Y-%m-%d %H:%M:%S")
    owner["claim"] = uuid4().hex  # two claims of one process may be made within a second
    try:
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), json.dumps(owner).encode())
    except OSError as problem:  # disk full
        raise FolderError(f"the run folder {path} cannot be written: {problem.strerror}") from problem


def _ranks_end(path: Path, patience: float) -> bool:
    """Wait up to ``patience`` seconds for ranks that lock ``path`` to end; return whether they did."""
    began, said = time.monotonic(), False
    while _is_held(path / RANKS_LOCK):
        waited = time.monotonic() - began
        if waited >= patience:
            return False
        if waited >= SILENCE and not said:
            said = True
            log.say(
                f"waiting for ranks of a run that has lost its launcher to end: they hold {path}",
                level="warning",
            )
        time.sleep(0.1)
    return True


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, started {owner['start']}"
    except (ValueError, KeyError, TypeError):
        return "it did not say which"


def _is_held(lock: Path) -> bool:
    """Return whether a live process has locked a file, without keeping the lock; False without locks."""
    for mode in ("r+", "r"):  # NFS can only lock writable files; that of another user may only be readable
        try:
            with open(lock, mode, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except PermissionError:
            continue
        except OSError:
            return False
        return False
    return False


def hold_as_rank(path: Path) -> IO[str] | None:
    """Hold a shared rank lock until the file is closed or this process ends; None without locks."""
    try:
        held = open(path / RANKS_LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held until the process ends
        fcntl.flock(held, fcntl.LOCK_SH)  # a process checking for live ranks holds it briefly
    except OSError:
        return None
    return held


def is_gone(path: Path, held: IO[str]) -> bool:
    """Return whether the run folder was deleted or replaced since ``held``, a file in it, was opened.

    On NFS ``stat`` may be answered from a cache of some seconds; to open a file asks the server.
    """
    try:
        opened = os.fstat(held.fileno())
    except OSError as problem:
        return problem.errno == errno.ESTALE  # another client of NFS has deleted it
    try:
        with open(path / Path(held.name).name, "rb") as now:
            return not os.path.samestat(opened, os.fstat(now.fileno()))
    except FileNotFoundError:
        return True
    except OSError:  # a network error, for example: it may recover
        return False


def is_surely_gone(path: Path, held: IO[str], stop: StopRequest) -> bool:
    """Return whether the run folder :func:`is_gone` in several looks, and stop the run in this case."""
    for look in range(LOOKS):
        time.sleep(BETWEEN if look else 0)
        if not is_gone(path, held):
            return False
    _lose(path, stop)
    return True


def _lose(path: Path, stop: StopRequest) -> None:
    if stop.request("lost"):
        log.say(f"the run folder {path} was deleted or replaced: the run ends and saves no more")


def stop_without(path: Path, held: IO[str] | None, stop: StopRequest) -> None:
    """Stop a run when its folder is gone: another run may have replaced it, or saves would be lost.

    A thread looks once a second. Ranks also ask right before they write there (``stop.folder_gone``): those
    that were suspended meanwhile would otherwise save in the folder of another run, and delete its
    checkpoints as old ones of their own.

    Args:
        path: of the folder.
        held: what :func:`hold_as_rank` returned; watched until it is closed.
        stop: the run's stop request.
    """

    def look() -> None:
        missed = 0
        while held is not None and not held.closed:
            with suppress(ValueError):  # it was closed meanwhile
                missed = missed + 1 if is_gone(path, held) else 0
                if missed == LOOKS:
                    _lose(path, stop)
                    return
            until = time.monotonic() + BETWEEN
            while time.monotonic() < until and not held.closed:  # an attempt waits for this thread
                time.sleep(BETWEEN / 20)

    stop.folder_gone = partial(is_surely_gone, path, held, stop) if held is not None else lambda: False
    threading.Thread(target=look, name="folder", daemon=True).start()
