"""Which files a corpus is made of, and how they are cut into units: one unit becomes one shard.

Units depend on names and sizes alone, never on the number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from nanotrain_core.api import DataError
from nanotrain_core.api.text import TextSource, missing_path

#: Suffixes of files that are a document each.
TEXT_SUFFIXES = (".txt", ".md", ".py")
#: Bytes up to which a file of text is one document. A larger one is cut behind a line: no model reads as much
#: at once, and a corpus is often a single file.
LARGEST = 2**26
#: Suffixes of files that hold a JSON object in each line.
LINE_SUFFIXES = (".jsonl", ".ndjson")
#: Suffixes after one of these, of files that are compressed as a whole, and how much larger text is.
COMPRESSED = {".gz": 4, ".zst": 4}
#: Bytes up to which a file of a form is not cut, whatever is wanted.
LARGEST_WHOLE = {"text": LARGEST, "lines": 0}
#: Bytes that are read at a time.
CHUNK = 2**20


@attrs.define(frozen=True)
class Part:
    """A file, or a stretch of one."""

    path: str
    name: str
    """Relative to the source that it was found in."""
    form: str
    """``text``, ``lines``, ``parquet`` or ``arrow``."""
    begin: int
    end: int
    """Of text, bytes: the lines that begin there. Of parquet, row groups. 0 and 0: all of it."""
    size: int
    """Bytes to read, about."""

    @property
    def whole(self) -> bool:
        """Whether it is all of a file."""
        return self.end == 0

    @property
    def identity(self) -> list[str | int]:
        """What of it decides the documents, wherever the file lies."""
        return [self.name, self.form, self.begin, self.end, self.size]


@attrs.define(frozen=True)
class Unit:
    """What becomes one shard."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def sha256(self) -> str:
        """Return a hash over what decides the documents of its parts now.

        Raises:
            DataError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            try:
                with open(part.path, "rb") as file:
                    for data in _deciding(part, file):
                        digest.update(data)
            except OSError as error:
                raise DataError(f"cannot read {part.path}: {error.strerror}") from None
        return digest.hexdigest()


def _deciding(part: Part, file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes that decide the documents of a part, in pieces: of a table or a whole file, all.

    A stretch has the lines that begin in it. Whether one begins at its first byte is seen by the byte before,
    and its last line may end behind it.
    """
    if part.whole or part.form not in ("text", "lines"):
        while data := file.read(CHUNK):
            yield data
        return
    file.seek(max(part.begin - 1, 0))
    data = b""
    while left := part.end - file.tell():
        if not (data := file.read(min(left, CHUNK))):
            return  # it was cut short
        yield data
    while data and not data.endswith(b"\n"):
        data = file.readline(CHUNK)
        yield data


def units_of(sources: Sequence[str], suffixes: Sequence[str], unit_bytes: int) -> list[Unit]:
    """Return the units of all sources, in an order that is the same on every machine.

    Raises:
        DataError: a source is missing, cannot be read, or has no file that is known.
    """
    units: list[list[Part]] = [[]]
    size = 0
    for source in sources:
        for part in _parts(Path(source), suffixes, unit_bytes):
            if units[-1] and size + part.size > unit_bytes:
                units.append([])
                size = 0
            units[-1].append(part)
            size += part.size
    return [Unit(tuple(parts)) for parts in units if parts]


def form_of(path: Path, suffixes: Sequence[str]) -> str | None:
    """Return how a file is read; None: not at all."""
    inner = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    if inner in suffixes:
        return "text"
    if inner in LINE_SUFFIXES:
        return "lines"
    return {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix)


def _parts(source: Path, suffixes: Sequence[str], unit_bytes: int) -> Iterator[Part]:
    if not source.exists():
        raise DataError(missing_path(source, "source"))
    root = source if source.is_dir() else source.parent
    for path in _files(source, suffixes):
        form = form_of(path, suffixes)
        if form is None:
            raise DataError(
                f"{path}: {_known(suffixes)}; '--suffixes {path.suffix or '.txt'}' reads it as text"
            )
        try:
            yield from _cut(path, path.relative_to(root).as_posix(), form, unit_bytes)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None


def _files(source: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a source: of a folder that Hugging Face ``datasets`` saved, those that it lists."""
    if (source / "dataset_dict.json").is_file():
        some = " or ".join(str(source / name) for name in _json(source / "dataset_dict.json", "splits"))
        raise DataError(f"{source} holds several splits of a dataset; name one of them: {some}")
    if (source / "state.json").is_file() and (source / "dataset_info.json").is_file():
        return [source / str(file["filename"]) for file in _json(source / "state.json", "_data_files")]
    known = (*suffixes, *LINE_SUFFIXES, *COMPRESSED, ".parquet")
    found = TextSource(source, known, hint="--suffixes names others that are text").files()
    return [path for path in found if not source.is_dir() or form_of(path, suffixes)]


def _json(path: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(path.read_bytes())[key])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: expected what save_to_disk of datasets writes") from None


def _cut(path: Path, name: str, form: str, unit_bytes: int) -> Iterator[Part]:
    """Yield a file in parts of at most ``unit_bytes``, where it can be entered in its middle."""
    found = path.stat()
    times = COMPRESSED.get(path.suffix, 1)
    if form in ("text", "lines") and times == 1 and found.st_size > max(unit_bytes, LARGEST_WHOLE[form]):
        count = -(-found.st_size // unit_bytes)
        edges = [found.st_size * number // count for number in range(count + 1)]
        for begin, end in pairwise(edges):
            yield Part(str(path), name, form, begin, end, end - begin)
    elif form == "parquet":
        from nanotrain_data.tables import row_groups

        for begin, end, size in row_groups(path, unit_bytes):
            yield Part(str(path), name, form, begin, end, size)
    elif found.st_size:
        yield Part(str(path), name, form, 0, 0, found.st_size * times)


def _known(suffixes: Sequence[str]) -> str:
    lines = ", ".join(LINE_SUFFIXES)
    return (
        f"expected text ({', '.join(suffixes)}) or JSON lines ({lines}), as they are or with "
        f"{' or '.join(COMPRESSED)} behind, .parquet, or a folder that datasets saved"
    )
