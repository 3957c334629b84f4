"""Finds and reads the files of a text corpus."""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from nanotrain_core.errors import DataError, did_you_mean

#: Folders of the standard library that are not its source proper: installed packages, tests, the editor.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"})


@attrs.define(frozen=True)
class Document:
    """One file."""

    name: str
    """Relative to the folder it was found in, with forward slashes."""
    content: bytes


@attrs.define(frozen=True)
class Source:
    """A file, or a folder of which files with one of ``suffixes`` are read.

    Hidden files and folders, and empty files of a folder, are skipped. Symbolic links are followed.
    """

    path: Path
    suffixes: Sequence[str]
    skip: frozenset[str] = frozenset()
    """Names of folders that are skipped."""
    hint: str = "set data.suffixes"
    """What to do if no file has one of the suffixes."""

    def files(self) -> list[Path]:
        """Return the files, in the same order on every machine.

        Raises:
            DataError: the path does not exist, or the folder has no matching files.
        """
        if not self.path.is_dir():
            if not self.path.exists():
                raise DataError(missing_path(self.path, "data path"))
            return [self.path]
        files = list(_files(self.path, self.skip))
        chosen = sorted(Path(file) for file in files if os.path.splitext(file)[1] in self.suffixes)
        if not chosen:
            raise DataError(
                f"data folder {self.path} has no file with suffix {', '.join(self.suffixes)}: "
                f"{_suffixes_of(sorted(map(Path, files)), self.hint)}"
            )
        return chosen

    def documents(self) -> list[Document]:
        """Read the files.

        Raises:
            DataError: as :meth:`files`, or one cannot be read.
        """
        root = self.path if self.path.is_dir() else self.path.parent
        documents = [Document(file.relative_to(root).as_posix(), _content(file)) for file in self.files()]
        return [document for document in documents if document.content or root != self.path]

    def sizes(self) -> list[int]:
        """Return the bytes of each of :meth:`documents`, without reading them.

        Raises:
            DataError: as :meth:`documents`.
        """
        sizes = [_size(file) for file in self.files()]
        return [size for size in sizes if size or not self.path.is_dir()]


def sources(paths: Sequence[str], suffixes: Sequence[str]) -> list[Source]:
    """Return the sources of a corpus: without ``paths`` the Python standard library, without its tests."""
    if not paths:
        return [Source(Path(sysconfig.get_path("stdlib")), (".py",), NOT_LIBRARY)]
    return [Source(Path(path), suffixes) for path in paths]


def read_documents(paths: Sequence[str], suffixes: Sequence[str]) -> list[Document]:
    """Read the documents of all :func:`sources`.

    Raises:
        DataError: a path does not exist or cannot be read, or a folder has no matching files.
    """
    return [document for source in sources(paths, suffixes) for document in source.documents()]


def fingerprint(documents: Iterable[Document]) -> str:
    """Return a SHA-256 over names, sizes and contents, in hexadecimal."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{len(document.content)}\0".encode(errors="surrogateescape"))
        digest.update(document.content)
    return digest.hexdigest()


def missing_path(path: Path, what: str) -> str:
    """Return an error that names the first missing part of ``path``, and similar names."""
    parent, child = path.parent, path
    while not parent.exists() and parent != parent.parent:
        parent, child = parent.parent, parent
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    return f"{what} {path} does not exist: no {child.name!r} in {parent}{did_you_mean(child.name, names)}"


def _files(folder: Path, skip: frozenset[str]) -> Iterator[str]:
    """Yield the files of a folder, those of folders that are symbolic links too, each folder once.

    Links are followed after all else: what is also there without one keeps its name, and loops end.
    """
    seen: set[str] = set()
    waiting = [folder]
    while waiting:
        links: list[Path] = []
        for start in sorted(waiting):
            for parent, folders, names in os.walk(start):
                if (real := os.path.realpath(parent)) in seen:
                    folders.clear()
                    continue
                seen.add(real)
                folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
                links += [path for name in folders if (path := Path(parent, name)).is_symlink()]
                yield from (os.path.join(parent, name) for name in names if not name.startswith("."))
        waiting = links


def _suffixes_of(files: Sequence[Path], hint: str) -> str:
    counts = Counter(file.suffix or "none" for file in files).most_common(5)
    if not counts:
        return "it has no files"
    return "it has " + ", ".join(f"{suffix} ({count})" for suffix, count in counts) + f"; {hint}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _size(path: Path) -> int:
    """Return the size in bytes of a readable file."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot read {path}: {os.strerror(errno.EACCES)}")
    return size
