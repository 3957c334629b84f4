"""The documents of a part of a corpus, one after another: no more of a file is in memory than a document."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from nanotrain_core.api import DataError, did_you_mean
from nanotrain_data.chat_template import Message, Tools, with_strings
from nanotrain_data.conversations import TOOLS, messages_of, tools_of
from nanotrain_data.fields import Field, checked
from nanotrain_data.sources import CHUNK, LARGEST, Part


def conversations(part: Part, field: str) -> Iterator[tuple[Callable[[], str], list[Message], Tools]]:
    """Yield the conversations of a part, each with a function that says where it is: file and line or row.

    To count the lines before a part takes a reading of all of them, so it is called only for an error.

    Tools are those that stand beside it, in a field or column of that name.

    Args:
        part: of a corpus.
        field: where in a JSON object, or which column of a table, the list of messages is.

    Raises:
        DataError: as :func:`documents`; or a list is not of messages.
    """
    if part.form == "text":
        raise DataError(f"{part.path} is text; conversations are read of JSON lines, parquet, or datasets")
    try:
        for where, (messages, tools) in _values(part, (field, messages_of), (TOOLS, tools_of)):
            yield where, with_strings(messages, _sound), with_strings(tools, _sound)
    except OSError as error:
        raise DataError(f"cannot read {part.path}: {error.strerror or error}") from None


def documents(part: Part, field: str, end: str | None = None) -> Iterator[str]:
    """Yield the texts of a part; a row whose text is null has an empty one.

    Args:
        part: of a corpus.
        field: where in a JSON object, or which column of a table, the text is.
        end: what ends documents, if it is a character: no text may have it.

    Raises:
        DataError: a file cannot be read or is not what its suffix says, with the line or row.
    """
    path = Path(part.path)
    try:
        if part.form == "text":
            texts: Iterator[str] = _of_text(part, end)
        else:
            texts = (text for _, (text,) in _values(part, (field, partial(text_of, end=end))))
        yield from map(_sound, texts)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def text_of(value: Any, end: str | None = None) -> str:
    """Return a text that was read; a null of JSON or of a table is an empty one.

    Raises:
        ValueError: it is none, or has the character ``end``.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"is of type {type(value).__name__}; expected a string")
    if end is not None and end in value:
        raise ValueError(
            f"has the character {end!r}, with which this tokenizer ends documents: remove it, take another "
            "tokenizer, or give --no-end"
        )
    return value


def _values(part: Part, *fields: Field) -> Iterator[tuple[Callable[[], str], list[Any]]]:
    """Yield what is in fields or columns, each with a function that says where that is.

    The first has to be there; of others that are missing, None is yielded.
    """
    if part.form == "lines":
        yield from _of_lines(part, fields)
    else:
        from nanotrain_data.tables import values_of

        yield from values_of(part, fields)


def _sound(text: str) -> str:
    """Return a text that UTF-8 has: half a surrogate pair, which JSON may escape, becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _of_text(part: Part, end: str | None) -> Iterator[str]:
    with _opened(Path(part.path)) as file:
        place = _first_line(part, file)
        while part.whole or place < part.end:
            wanted = LARGEST if part.whole else min(LARGEST, part.end - place)
            stretch = file.read(wanted)
            if len(stretch) == wanted and not stretch.endswith(b"\n"):
                stretch += file.readline()
            if not stretch:
                return
            text = _decoded(stretch, part, place)
            try:
                text_of(text, end)
            except ValueError as problem:
                raise DataError(f"{part.path}: the text at byte {place} {problem}") from None
            yield text
            place += len(stretch)


def _decoded(stretch: bytes, part: Part, place: int) -> str:
    """Return a stretch of a file, which begins at the byte ``place``, as text.

    Raises:
        DataError: it is not UTF-8. Replacement characters would be learned.
    """
    try:
        return stretch.decode()
    except UnicodeDecodeError as problem:
        where = f"byte {place + problem.start}"
        raise DataError(f"{part.path}: no UTF-8 at {where}; expected a text: convert it, see iconv") from None


def _first_line(part: Part, file: BinaryIO) -> int:
    """Go to the first line that begins in a part: those before are of another. Return where that is."""
    if part.whole or not part.begin:
        return 0
    file.seek(part.begin - 1)
    return part.begin - 1 + len(file.readline())


def _of_lines(part: Part, fields: Sequence[Field]) -> Iterator[tuple[Callable[[], str], list[Any]]]:
    with _opened(Path(part.path)) as file:
        place = _first_line(part, file)
        lines = 0
        while part.whole or place < part.end:
            line = file.readline()
            if not line:
                return
            lines += 1
            if line.strip():
                where = partial(_where, part, place, lines)
                yield where, _values_of(line, fields, where)
            place += len(line)


def _values_of(line: bytes, fields: Sequence[Field], where: Callable[[], str]) -> list[Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"))  # json itself lets surrogates pass
    except UnicodeDecodeError as error:
        text = f"no UTF-8 at byte {error.start} of the line; expected JSON lines: convert them, see iconv"
        raise DataError(f"{where()}: {text}") from None
    except ValueError as error:
        raise DataError(f"{where()}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where()}: expected a JSON object, got {line[:40]!r}")
    field = fields[0][0]
    if field not in found:
        near = did_you_mean(field, list(found))
        text = f"no field '{field}'{near}; it has {', '.join(found) or 'none'}; --field names another"
        raise DataError(f"{where()}: {text}")
    return checked(found, fields, lambda name: f"{where()}: field '{name}'")


def _where(part: Part, place: int, lines: int) -> str:
    """Return file and line: those before a part are counted only where something is wrong."""
    before = 0
    if part.begin:
        with open(part.path, "rb") as file:
            while data := file.read(min(CHUNK, place - file.tell())):
                before += data.count(b"\n")
        before -= lines - 1
    return f"{part.path}:{before + lines}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed.

    Raises:
        DataError: it is damaged, or ends too early.
    """
    with path.open("rb") as file:
        try:
            if path.suffix == ".gz":
                with gzip.open(file) as inner:
                    yield inner  # type: ignore[misc]
            elif path.suffix == ".zst":
                yield io.BufferedReader(_Chunks(_of_zst(path, file)), CHUNK)
            else:
                yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}") from None


def _of_zst(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield what frames of Zstandard hold; zstandard's own stream takes a cut one for its end."""
    try:
        import zstandard
    except ImportError:
        text = f"{path} needs the package zstandard: pip install nanotrain-data[zstd]"
        raise DataError(text) from None
    frame, left = zstandard.ZstdDecompressor().decompressobj(), b""
    begun = False
    try:
        while data := left or file.read(CHUNK):
            begun = True
            yield frame.decompress(data)
            left = b""
            if frame.eof:
                left, begun = frame.unused_data, False
                frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if begun:
        raise DataError(f"{path} is damaged: it ends within a frame")


class _Chunks(io.RawIOBase):
    """A stream of what an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
