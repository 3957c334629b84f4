"""Safetensors files: hashed while they are written, verified before they are trusted. Torch-free.

A file is written completely and flushed to disk before it counts. The hash is computed in a second
thread, in parallel with writing: each takes about as long.

Source of the format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import file_digest, sha256
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nanotrain_core.api import DTYPE_BYTES, CheckpointError, Shape, load_json
from nanotrain_sharded_ckpt_v2.manifest import File

#: Bytes written and hashed at once, and the size below which parts are joined first.
PIECE, SMALL = 16 * 2**20, 2**20
#: Number of pieces that hashing may lag behind: it continues while the disk is flushed.
AHEAD = 64
#: Maximum size of a header that is read, as in safetensors itself.
LARGEST_HEADER = 100 * 2**20


@attrs.define(frozen=True)
class Form:
    """A header's entry for one tensor."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


def write(path: Path, forms: Mapping[str, Form], parts: Iterable[memoryview]) -> File:
    """Write a new file and flush it to disk.

    Args:
        path: must not exist.
        forms: of all tensors, in file order: largest dtypes first, so that each is aligned.
        parts: their bytes, in the same order, in pieces of any length.
    """
    size, digest, waiting = 0, sha256(), deque[Future[None]]()
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for piece in _pieces(header(forms), parts):
            waiting.append(hasher.submit(digest.update, piece))
            _write_all(file, piece)
            size += len(piece)
            if len(waiting) > AHEAD:
                waiting.popleft().result()
        os.fsync(file.fileno())
    return File(size, digest.hexdigest())


def _write_all(file: Any, piece: memoryview) -> None:
    """Write everything: without a buffer, one call may write less."""
    while piece:
        piece = piece[file.write(piece) :]


def header(forms: Mapping[str, Form]) -> bytes:
    """Return eight bytes for the header's length, and the header as JSON."""
    table: dict[str, Any] = {}
    end = 0
    for name, form in forms.items():
        begin, end = end, end + form.nbytes
        table[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [begin, end]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(first: bytes, parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of :data:`PIECE`, or what is left."""
    small = bytearray(first)
    for part in parts:
        large = len(part) >= SMALL
        if not large:
            small += part
        if small and (large or len(small) >= PIECE):
            yield memoryview(small)
            small = bytearray()
        for begin in range(0, len(part) if large else 0, PIECE):
            yield part[begin : begin + PIECE]
    if small:
        yield memoryview(small)


# --- looking at files -----------------------------------------------------------------------------


def plain(path: Path) -> bool:
    """Return whether the file exists and is not a link."""
    return path.is_file() and not path.is_symlink()


def read_header(path: Path) -> dict[str, Form]:
    """Return the contents of a file's header.

    Raises:
        CheckpointError: it is not a safetensors file, or a link to one.
    """
    if not plain(path):
        raise CheckpointError(f"{path} is missing, or is no plain file")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes; at most {LARGEST_HEADER} are read")
            table = load_json(file.read(length))
        table.pop("__metadata__", None)
        found = {name: Form(entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()}
        _expect_gapless(found, table, path.stat().st_size - 8 - length)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path} is no safetensors file: {problem}") from None


def _expect_gapless(forms: Mapping[str, Form], table: Mapping[str, Any], size: int) -> None:
    """Check that tensors follow one another up to the end of the file, as safetensors requires.

    Raises:
        ValueError: they do not, or the size of one does not match its shape.
    """
    end = 0
    for name, form in sorted(forms.items(), key=lambda item: table[item[0]]["data_offsets"]):
        if any(type(number) is not int or number < 0 for number in form.shape):
            raise ValueError(f"{name} has shape {form.shape}")
        begin, end_before = table[name]["data_offsets"][0], end
        end += form.nbytes
        if [begin, end] != [end_before, *table[name]["data_offsets"][1:]]:
            raise ValueError(f"{name} is at {table[name]['data_offsets']}, expected at {[end_before, end]}")
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, and there are {size}")


def damage(folder: Path, name: str, file: File, *, full: bool) -> str:
    """Return what is wrong with a file in a manifest: empty if it is intact.

    Args:
        folder: of the checkpoint.
        name: of the file.
        file: its entry in the manifest.
        full: compare its SHA-256, which reads all of it; otherwise only its size.
    """
    path = folder / name
    try:
        if not plain(path):
            return f"{path} is missing, or is no plain file"
        if path.stat().st_size != file.bytes:
            return f"{path} has {path.stat().st_size} bytes, {file.bytes} were written"
        if full:
            with path.open("rb") as opened:
                if file_digest(opened, "sha256").hexdigest() != file.sha256:
                    return f"{path} is damaged: its bytes do not match its SHA-256"
    except OSError as problem:
        return f"{path} cannot be read: {problem.strerror or problem}"
    return ""


def unreadable(path: Path) -> str:
    """Return why a file cannot be read: empty if it can."""
    try:
        read_header(path)
    except CheckpointError as problem:
        return str(problem)
    return ""


def misfit(path: Path, expected: Mapping[str, Form]) -> str:
    """Return how the header of a shard differs from the manifest: empty if it does not."""
    try:
        found = read_header(path)
    except CheckpointError as problem:
        return str(problem)
    for name, form in expected.items():
        if found.get(name) != form:
            return f"{path}: {name} is {_said(found.get(name))} there, {_said(form)} in the manifest"
    extra: Sequence[str] = sorted(found.keys() - expected.keys())
    return f"{path} holds {extra[0]}, which is not in the manifest" if extra else ""


#: The exponent bits of a float: all of them are 1 in a NaN and an infinity.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def not_finite(path: Path, names: Collection[str]) -> Iterator[str]:
    """Yield which of these tensors of a shard with a valid header have a NaN or an infinity."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length))
    content = np.memmap(path, np.uint8, mode="r", offset=8 + length) if names else np.empty(0, np.uint8)
    for name in names:
        code, mask = EXPONENTS.get(table[name]["dtype"], ("", 0))
        begin, end = table[name]["data_offsets"]
        if code and begin < end and bool(((content[begin:end].view(code) & mask) == mask).any()):
            yield name


#: NumPy dtypes of random-number streams.
NUMPY = {"I64": "<i8", "F64": "<f8", "U8": "|u1"}


def arrays(path: Path) -> dict[str, Any]:
    """Return the tensors of a small file with a valid header; those of other dtypes as bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        first, end = (begin + number for number in entry["data_offsets"])
        plain = np.frombuffer(data[first:end], NUMPY.get(entry["dtype"], "|u1"))
        found[name] = plain.reshape(entry["shape"] if entry["dtype"] in NUMPY else -1)
    return found


def _said(form: Form | None) -> str:
    return f"{form.dtype} {form.shape}" if form else "missing"
