"""Atomic file writes, and lines appended whole."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path


def write_atomically(
    path: Path, write: Callable[[Path], object], *, private: bool = False, flushed: bool = True
) -> None:
    """Let ``write`` fill a temporary file next to ``path``, flush it to disk and move it into place.

    The file's mode is that of any new file, even if ``write`` replaces it by a private one.

    Args:
        path: of the file.
        write: fills the file that it is given.
        private: whether only its owner may read it.
        flushed: false where the file need not outlast the host, or must not wait for a slow disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(0o600 if private else 0o666)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)
        if flushed:
            flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if flushed:
        flush(path.parent)


def write_problem(path: Path, *, recipe: str = "") -> str:
    """Return why no file can be written there, empty if one can: a command that takes long asks it first.

    ``recipe``: the file that the command reads, which it must not replace. Of a symbolic link its target is
    looked at: write to ``path.resolve()``, or the link is replaced.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if recipe and path.resolve() == Path(recipe).resolve():
        return "this is the recipe, which would be lost"
    if path.exists() and not path.is_file():
        return f"expected a file, this is a {'folder' if path.is_dir() else 'device, pipe or socket'}"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as problem:
        return f"cannot be written: {problem.strerror}"
    return ""


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed writers. No other process may be writing to ``folder``.

    Those that cannot be deleted, such as one that another client of NFS has open, only take space.
    """
    for leftover in folder.glob(".*.tmp"):
        if not leftover.is_file():  # a folder of that name is not ours
            continue
        try:
            leftover.unlink(missing_ok=True)
        except OSError as problem:
            import structlog  # imports rich, which `nanotrain --help` avoids

            log = structlog.get_logger("nanotrain.files")
            log.warning("a leftover could not be deleted", path=str(leftover), problem=problem.strerror)


def write_text_atomically(path: Path, text: str, *, private: bool = False, flushed: bool = True) -> None:
    """Write UTF-8 text atomically: a reader sees either the old file or the new one.

    Args:
        path: of the file.
        text: its content.
        private: whether only its owner may read it.
        flushed: see :func:`write_atomically`.
    """
    write = partial(_write_text, text=text)
    write_atomically(path, write, private=private, flushed=flushed)


class LineFile:
    """A file to which lines are appended, unbuffered.

    A line that is incomplete because its writer was killed or the disk was full is ended before the next one,
    which would otherwise be lost with it.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the file; unless ``create``, it must exist."""
        kept = -1 if create else ~os.O_CREAT
        self.path = path
        self._file = open(  # noqa: SIM115
            path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags & kept, 0o666)
        )
        self._may_be_torn = True

    def append(self, line: str) -> None:
        """Append a line, given without its end, in one write unless the disk is full.

        Raises:
            OSError: it is not in the file, or not all of it.
        """
        data = (b"\n" if self._may_be_torn and is_torn(self.path) else b"") + line.encode() + b"\n"
        self._may_be_torn = True
        while data:
            data = data[self._file.write(data) :]
        self._may_be_torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append_line(path: Path, line: str, *, create: bool = True) -> None:
    """Append a line to a file, after ending one that was cut short; the file is not kept open."""
    file = LineFile(path, create=create)
    try:
        file.append(line)
    finally:
        file.close()


def is_torn(path: Path) -> bool:
    """Return whether the last line of a file is incomplete; false for pipes and devices.

    A line that another process is writing is not: its file still grows.
    """
    size = -1
    while path.is_file():
        with open(path, "rb") as file:
            now = file.seek(0, 2)
            if now == 0 or file.seek(-1, 2) < 0 or file.read(1) == b"\n":
                return False
        if now == size:
            return True
        size = now
        time.sleep(0.01)
    return False


def read_each(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield each matching file and its text; files deleted before they are read are omitted."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.read_text(encoding="utf-8")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk.

    Some file systems flush no folders, such as those of SMB and FUSE: there entries are as safe as they get.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
