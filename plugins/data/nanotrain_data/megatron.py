"""Megatron-LM's indexed datasets, ``PREFIX.bin`` and ``PREFIX.idx``, to prepared folders and back.

The layout is that of ``megatron/core/datasets/indexed_dataset.py``: the index has a header of 9 bytes, a
version (uint64, 1), a code of the tokens' type (uint8), counts of sequences and of document indices (uint64
each), then the length of each sequence (int32), where it begins in the ``.bin`` in bytes (int64), and the
sequence at which each document begins, and the end (int64). All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError, flush, write_atomically
from nanotrain_core.api.text import missing_path
from nanotrain_data.codecs import describe_codec, open_codec
from nanotrain_data.inspect import document_lengths
from nanotrain_data.manifest import NAME, Manifest, TokenizerInfo, read_manifest, stored_dtype
from nanotrain_data.verify import damage
from nanotrain_data.writer import Document, map_tokens, shard_name, write_shard

HEADER = b"MMIDIDX\x00\x00"
#: Types of tokens by their code; others are of no tokens.
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
#: Tokens of a shard, about: documents stay whole.
SHARD_TOKENS = 2**27


Tokens = npt.NDArray[Any]


@attrs.define(frozen=True, eq=False)
class Index:
    """What an ``.idx`` says of its ``.bin``."""

    dtype: str
    lengths: npt.NDArray[np.int32]
    """Tokens of each sequence, [sequences]."""
    pointers: npt.NDArray[np.int64]
    """Byte at which each begins, [sequences]."""
    documents: npt.NDArray[np.int64]
    """Sequence at which each document begins, and the end, [documents + 1]."""


def prefix_of(path: Path) -> Path:
    """Return ``PREFIX`` of itself or of one of its two files."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def file_of(prefix: Path, suffix: str) -> Path:
    """Return one of the two files of a prefix, which may itself have dots in it."""
    return prefix.with_name(prefix.name + suffix)


def read_index(prefix: Path) -> Index:
    """Read ``PREFIX.idx``, mapped into memory.

    Raises:
        DataError: it is missing, or not such a file, or says what cannot be.
    """
    path = file_of(prefix, ".idx")
    if not path.is_file():
        raise DataError(missing_path(path, "index"))
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    if content[:9].tobytes() != HEADER or len(content) < 34:
        raise DataError(f"{path} is no index of Megatron-LM: expected its first 9 bytes to be {HEADER!r}")
    version, code, sequences, documents = struct.unpack("<QBQQ", content[9:34].tobytes())
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{path}: version {version}, code {code}; expected version 1 and a code of whole numbers"
        )
    wanted = 34 + 12 * sequences + 8 * documents
    if len(content) not in (wanted, wanted + sequences):  # with a mode for each sequence: of images, say
        raise DataError(f"{path} is damaged: it has {len(content)} bytes, and its counts need {wanted}")
    edges = np.cumsum([34, 4 * sequences, 8 * sequences, 8 * documents])
    parts = [content[begin:end].tobytes() for begin, end in pairwise(edges.tolist())]
    lengths, pointers, starts = (
        np.frombuffer(part, dtype) for part, dtype in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
    )
    ordered = len(starts) and starts[0] == 0 and starts[-1] == sequences and (np.diff(starts) >= 0).all()
    if not ordered or (lengths < 0).any():
        raise DataError(f"{path} is damaged: its documents do not follow one another")
    return Index(DTYPES[code], lengths, pointers, starts)


def write_index(prefix: Path, dtype: str, lengths: npt.NDArray[np.int64]) -> None:
    """Write ``PREFIX.idx`` of documents that are a sequence each, one after another in the ``.bin``."""
    code = next(code for code, name in DTYPES.items() if name == dtype)
    count, itemsize = len(lengths), np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * itemsize if count else np.empty(0)

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            file.write(HEADER + struct.pack("<QBQQ", 1, code, count, count + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write(pointers.astype("<i8").tobytes())
            file.write(np.arange(count + 1).astype("<i8").tobytes())

    write_atomically(file_of(prefix, ".idx"), fill)


def export_folder(folder: Path, prefix: Path) -> str:
    """Write a prepared folder as ``PREFIX.bin`` and ``PREFIX.idx``, and return what was written.

    Raises:
        DataError: the folder is damaged or of conversations, or the files are there.
    """
    manifest = read_manifest(folder)
    if manifest.chat is not None:
        raise DataError(
            f"{folder} holds conversations, and .bin and .idx have no loss mask, so prompts would be learned "
            "too; expected a folder of text (data.use = 'chat' trains on this one)"
        )
    if problems := damage(folder, manifest):
        raise DataError("\n".join(problems))
    for suffix in (".bin", ".idx"):
        if file_of(prefix, suffix).exists():
            raise DataError(f"{file_of(prefix, suffix)} is there: name another, or delete it")
    dtype = {"uint32": "int32"}.get(manifest.dtype, manifest.dtype)  # Megatron has no uint32
    prefix.parent.mkdir(parents=True, exist_ok=True)

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            for shard in manifest.shards:
                file.write(map_tokens(folder / f"{shard.name}.tokens", manifest.dtype).data)

    write_atomically(file_of(prefix, ".bin"), fill)
    write_index(prefix, dtype, document_lengths(folder, manifest))
    return (
        f"{prefix}.bin, {prefix}.idx: {manifest.documents:,} documents, {manifest.tokens:,} tokens as {dtype}"
    )


def import_prefix(prefix: Path, folder: Path, tokenizer: str | None) -> str:
    """Write ``PREFIX.bin`` and ``PREFIX.idx`` as a prepared folder, and return what was written.

    Args:
        prefix: of both files.
        folder: to write, new or empty.
        tokenizer: which made the tokens; None: nobody knows, and the vocabulary ends with the largest token.

    Raises:
        DataError: a file is missing or damaged, tokens are not of that tokenizer, or the folder is not empty.
    """
    index, path = read_index(prefix), file_of(prefix, ".bin")
    if not path.is_file():
        raise DataError(missing_path(path, "tokens"))
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty: name another folder")
    tokens = _tokens(path, index)
    largest = _largest(path, tokens)
    codec = None if tokenizer is None else open_codec(tokenizer)
    vocab = largest + 1 if codec is None else codec.vocab_size
    if largest >= vocab:
        raise DataError(f"{path} has token {largest}, but {tokenizer} has {vocab}: it is another tokenizer's")
    of_name = hashlib.sha256(b"unknown").hexdigest()
    info = TokenizerInfo(kind="unknown", name="not known", sha256=of_name)
    if tokenizer is not None:
        info = describe_codec(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None and info.file is not None:
        content = Path(tokenizer).read_bytes()
        write_atomically(folder / info.file, lambda copy: copy.write_bytes(content))
    dtype = stored_dtype(vocab)
    shards = []
    for number, (first, last) in enumerate(_shards(index)):
        documents = _documents(index, tokens, first, last)
        shards.append(write_shard(folder, shard_name(number), dtype, documents))
    manifest = Manifest(
        tokenizer=info,
        vocab_size=vocab,
        dtype=dtype,
        end_of_document=_common_end(index, tokens, codec.separator if codec else None),
        made_of=hashlib.sha256(file_of(prefix, ".idx").read_bytes()).hexdigest(),
        shards=tuple(shards),
    )
    manifest.write(folder)
    flush(folder)
    return f"{folder / NAME}: {manifest.documents:,} documents, {manifest.tokens:,} tokens as {dtype}"


def _shards(index: Index) -> Iterator[tuple[int, int]]:
    """Yield the documents of each shard: first, and one behind the last."""
    ends = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.documents]
    first, count = 0, len(ends) - 1
    while first < count:
        last = int(np.searchsorted(ends, ends[first] + SHARD_TOKENS, side="right")) - 1
        last = min(count, max(first + 1, last))
        yield first, last
        first = last


def _documents(index: Index, tokens: Tokens, first: int, last: int) -> Iterator[Document]:
    begins = index.pointers // tokens.itemsize
    for begin, end in pairwise(index.documents[first : last + 1].tolist()):
        some = [tokens[begins[n] : begins[n] + index.lengths[n]] for n in range(begin, end)]
        if any(map(len, some)):
            yield Document(np.concatenate(some), 0)


def _tokens(path: Path, index: Index) -> Tokens:
    """Return the tokens of a ``.bin``, mapped into memory.

    Raises:
        DataError: it is empty, or shorter than its index says.
    """
    dtype, size = np.dtype(index.dtype).newbyteorder("<"), path.stat().st_size
    ends = index.pointers + index.lengths.astype(np.int64) * dtype.itemsize
    if (index.pointers < 0).any() or (index.pointers % dtype.itemsize).any() or ends.max(initial=0) > size:
        raise DataError(
            f"{path} is damaged: it has {size} bytes, and its index ends at {ends.max(initial=0)}"
        )
    if not ends.max(initial=0):
        raise DataError(f"{path} has no tokens")
    return np.memmap(path, dtype, mode="r", shape=(size // dtype.itemsize,)).view(np.ndarray)


def _largest(path: Path, tokens: Tokens) -> int:
    """Return the largest token.

    Raises:
        DataError: one is below 0.
    """
    pieces = [tokens[begin : begin + SHARD_TOKENS] for begin in range(0, len(tokens), SHARD_TOKENS)]
    if smallest := min(0, *(int(piece.min()) for piece in pieces)):
        raise DataError(f"{path} has token {smallest}: expected numbers from 0 on")
    return max(int(piece.max()) for piece in pieces)


def _common_end(index: Index, tokens: Tokens, end: int | None) -> int | None:
    """Return the token that ends documents, if all of them end with the one of their tokenizer."""
    if end is None:
        return None
    ends = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.documents]
    last = index.documents[1:][np.diff(ends) > 0] - 1
    while (empty := np.flatnonzero(index.lengths[last] == 0)).size:  # of a document's sequences the last ones
        last[empty] -= 1
    places = index.pointers[last] // tokens.itemsize + index.lengths[last] - 1
    return end if (tokens[places] == end).all() else None
