"""Compares the files of a prepared folder with its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nanotrain_core.api import show_progress
from nanotrain_core.api.text import BLOCK_BYTES, HASH_BYTES, HashedTokens
from nanotrain_data.manifest import Manifest, ShardInfo
from nanotrain_data.writer import ANSWERS, file_sha256, map_tokens


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return which files are missing or not as large as the manifest says, a line each: no file is read."""
    return [line for shard in manifest.shards for line in _wrong_sizes(folder, manifest, shard)]


def _wrong_sizes(folder: Path, manifest: Manifest, shard: ShardInfo) -> Iterator[str]:
    itemsize = int(manifest.dtype.removeprefix("uint")) // 8
    nbytes = shard.tokens * itemsize
    wanted = {
        ".tokens": nbytes,
        ".offsets": 8 * (shard.documents + 1),
        ".hashes": -(-nbytes // BLOCK_BYTES) * HASH_BYTES,
    }
    if shard.answers is not None:
        wanted[ANSWERS] = 16 * shard.answers
    for suffix, size in wanted.items():
        path = folder / f"{shard.name}{suffix}"
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            yield f"{path} is missing"
        else:
            if found != size:
                yield f"{path} is damaged: it has {found} bytes, and {size} were written"


def offsets_problem(folder: Path, shard: ShardInfo, offsets: npt.NDArray[np.int64]) -> str:
    """Return why the file of offsets is not of the shard's tokens, empty if it is.

    Hashes do not tell if the file of tokens was cut short before they were made.
    """
    ordered = len(offsets) == shard.documents + 1 and offsets[-1] == shard.tokens and offsets[0] == 0
    if ordered and not (np.diff(offsets) < 0).any():
        return ""
    end = int(offsets[-1]) if len(offsets) else 0
    return (
        f"shard {folder / shard.name}.tokens is damaged, or its .offsets: it has {shard.tokens} tokens, and "
        f"{len(offsets) - 1} documents that end at token {end}; 'nanotrain data inspect {folder} --verify' "
        "tells what else is; prepare the folder again"
    )


def damage(folder: Path, manifest: Manifest) -> list[str]:
    """Read everything, and return what is missing or damaged, a line for each file."""
    problems = size_problems(folder, manifest)
    if problems:
        return problems
    total = sum((folder / f"{shard.name}.tokens").stat().st_size for shard in manifest.shards)
    with show_progress("verifying", total, "B") as advance:
        for shard in manifest.shards:
            problems += _damaged_files(folder, manifest, shard)
            advance((folder / f"{shard.name}.tokens").stat().st_size)
    return problems


def tokenizer_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return a line if the copy of the tokenizer is missing or damaged: tokens are read without it."""
    if manifest.tokenizer.file is None:
        return []
    path = folder / manifest.tokenizer.file
    if not path.is_file():
        what = "missing"
    elif file_sha256(path) != manifest.tokenizer.sha256:
        what = "damaged: its SHA-256 is another"
    else:
        return []
    return [f"{path} is {what}; copy {manifest.tokenizer.name} there, or prepare the folder again"]


def damaged_tables(folder: Path, shard: ShardInfo) -> Iterator[str]:
    """Yield which of the files that say where documents and answers are differ from the manifest."""
    for suffix, expected in ((".offsets", shard.offsets_sha256), (ANSWERS, shard.answers_sha256)):
        path = folder / f"{shard.name}{suffix}"
        if expected is not None and file_sha256(path) != expected:
            yield f"{path} is damaged: its SHA-256 is another"


def _damaged_files(folder: Path, manifest: Manifest, shard: ShardInfo) -> Iterator[str]:
    paths = {suffix: folder / f"{shard.name}{suffix}" for suffix in (".tokens", ".hashes")}
    yield from damaged_tables(folder, shard)
    if file_sha256(paths[".hashes"]) != shard.hashes_sha256:
        yield f"{paths['.hashes']} is damaged: its SHA-256 is another"
    elif file_sha256(paths[".tokens"]) != shard.sha256:
        tokens = map_tokens(paths[".tokens"], manifest.dtype)
        byte = HashedTokens(paths[".tokens"], tokens, paths[".hashes"].read_bytes()).first_damaged()
        yield f"{paths['.tokens']} is damaged at byte {byte} or behind it"
