"""Writes one shard: tokens, where documents begin, and hashes. Files appear whole or not at all.

Arrays are written by Python's files, which raise what goes wrong: ``ndarray.tofile`` ignores that its last
bytes did not fit on the disk, and what follows leaves zeros in their place.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from nanotrain_core.api import write_atomically
from nanotrain_core.api.text import block_hashes
from nanotrain_data.manifest import ShardInfo

#: What a shard's files are called after its name.
SUFFIXES = (".tokens", ".offsets", ".hashes")
#: And the file that shards of conversations have beside.
ANSWERS = ".answers"


class Document(NamedTuple):
    """A document, or a conversation."""

    tokens: Sequence[int] | npt.NDArray[Any]
    bytes: int
    """Of its text."""
    answers: Sequence[tuple[int, int]] = ()
    """Of a conversation, the stretches of its tokens that are learned."""


def shard_name(number: int) -> str:
    """Return the name of the shard of that number."""
    return f"{number:05d}"


def write_shard(
    folder: Path, name: str, dtype: str, documents: Iterable[Document | None], *, chat: bool = False
) -> ShardInfo:
    """Write a shard, one document after another: no more than one is in memory.

    Args:
        folder: there is one.
        name: of the files, without suffix.
        dtype: of the tokens; each fits.
        documents: each with the token that ends it, if they have one. Each None is one that was left out.
        chat: they are conversations.
    """
    paths = {suffix: folder / f"{name}{suffix}" for suffix in SUFFIXES}
    lengths: list[int] = []
    answers: list[tuple[int, int]] = []
    size = left_out = place = 0
    meant = hashlib.sha256()

    def fill(path: Path) -> None:
        nonlocal size, left_out, place
        with path.open("wb") as file:
            for document in documents:
                if document is None:
                    left_out += 1
                    continue
                tokens, of_text, learned = document
                stored = np.ascontiguousarray(tokens, _little(dtype)).data
                file.write(stored)
                meant.update(stored)
                answers.extend((place + begin, place + end) for begin, end in learned)
                lengths.append(len(tokens))
                place += len(tokens)
                size += of_text

    write_atomically(paths[".tokens"], fill)
    offsets = np.fromiter(itertools.accumulate(lengths, initial=0), "<i8", len(lengths) + 1)
    info = attrs.evolve(seal_shard(folder, name, dtype, offsets, size, meant.hexdigest()), left_out=left_out)
    if not chat:
        return info
    stretches = np.array(answers, "<i8").reshape(-1, 2)
    write_atomically(folder / f"{name}{ANSWERS}", lambda path: path.write_bytes(stretches.data))
    digest = hashlib.sha256(stretches.data).hexdigest()
    return attrs.evolve(info, answers=len(stretches), answers_sha256=digest)


def seal_shard(
    folder: Path, name: str, dtype: str, offsets: npt.NDArray[np.int64], size: int = 0, meant: str = ""
) -> ShardInfo:
    """Write what stands beside the tokens of a shard, which are there: where documents begin, and hashes.

    Args:
        folder: with the file of tokens.
        name: of the files, without suffix.
        dtype: of the tokens.
        offsets: where each document begins, and the end, [documents + 1].
        size: bytes of the text.
        meant: SHA-256 of the tokens that were to be written, if it is known.

    Raises:
        OSError: the file has other tokens.
    """
    paths = {suffix: folder / f"{name}{suffix}" for suffix in SUFFIXES}
    offsets = offsets.astype("<i8", copy=False)
    tokens = map_tokens(paths[".tokens"], dtype)
    sha256 = hashlib.sha256(tokens.data).hexdigest()
    if len(tokens) != offsets[-1] or meant not in ("", sha256):
        raise OSError(errno.EIO, f"{paths['.tokens']} does not hold what was written to it")
    write_atomically(paths[".offsets"], lambda path: path.write_bytes(offsets.data))
    hashes = block_hashes(tokens)
    write_atomically(paths[".hashes"], lambda path: path.write_bytes(hashes))
    return ShardInfo(
        name=name,
        documents=len(offsets) - 1,
        tokens=len(tokens),
        bytes=size,
        sha256=sha256,
        offsets_sha256=hashlib.sha256(offsets.data).hexdigest(),
        hashes_sha256=hashlib.sha256(hashes).hexdigest(),
    )


def map_tokens(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Return the tokens of a file, mapped into memory; an empty file cannot be."""
    if not path.stat().st_size:
        return np.empty(0, _little(dtype))
    return np.memmap(path, _little(dtype), mode="r")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
