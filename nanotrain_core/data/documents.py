"""Finds and reads the files of a text corpus."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from nanotrain_core.errors import DataError, did_you_mean

#: Folders of the standard library that are not its own working source: installed packages, tests, the editor.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"})


@attrs.define(frozen=True)
class Document:
    """One file."""

    name: str
    """Relative to the folder it was found in, with forward slashes."""
    content: bytes


def read_documents(paths: Sequence[str], suffixes: Sequence[str]) -> list[Document]:
    """Read files, and folders with all they hold, in an order that is the same on every machine.

    In a folder only files with one of ``suffixes`` are read; hidden files and folders and empty files
    are skipped. Without ``paths``, the Python standard library's own source is read, tests left out.

    Raises:
        DataError: a path does not exist, or a folder has nothing to read.
    """
    if not paths:
        return _read_folder(Path(sysconfig.get_path("stdlib")), (".py",), skip=NOT_LIBRARY)
    return [document for path in paths for document in _read(Path(path), suffixes)]


def fingerprint(documents: Iterable[Document]) -> str:
    """Return a SHA-256 over names, sizes and contents, in hexadecimal."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{len(document.content)}\0".encode(errors="surrogateescape"))
        digest.update(document.content)
    return digest.hexdigest()


def missing_path(path: Path, what: str) -> str:
    """Say that ``path`` does not exist, from which part on, and what has a name like it."""
    parent, child = path.parent, path
    while not parent.exists() and parent != parent.parent:
        parent, child = parent.parent, parent
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    return f"{what} {path} does not exist: no {child.name!r} in {parent}{did_you_mean(child.name, names)}"


def _read(path: Path, suffixes: Sequence[str]) -> list[Document]:
    if path.is_dir():
        return _read_folder(path, suffixes)
    if not path.exists():
        raise DataError(missing_path(path, "data path"))
    return [Document(path.name, _content(path))]


def _read_folder(folder: Path, suffixes: Sequence[str], skip: frozenset[str] = frozenset()) -> list[Document]:
    files = sorted(_files(folder, skip), key=lambda file: file.relative_to(folder).parts)
    chosen = [file for file in files if file.suffix in suffixes]
    if not chosen:
        raise DataError(
            f"data folder {folder} has no file with suffix {', '.join(suffixes)}: {_suffixes_of(files)}"
        )
    documents = [Document(file.relative_to(folder).as_posix(), _content(file)) for file in chosen]
    return [document for document in documents if document.content]


def _files(folder: Path, skip: frozenset[str]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _suffixes_of(files: Sequence[Path]) -> str:
    counts = Counter(file.suffix or "none" for file in files).most_common(5)
    if not counts:
        return "it has no files"
    return "it has " + ", ".join(f"{suffix} ({count})" for suffix, count in counts) + "; set data.suffixes"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
