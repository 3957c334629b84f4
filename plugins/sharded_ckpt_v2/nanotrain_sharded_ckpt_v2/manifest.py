"""``MANIFEST.json``: the description of a checkpoint, with a hash of every file. Torch-free.

Its last line is the SHA-256 of everything before it, the other files' hashes are in ``files``. It contains no
time or host name: the same state gives the same bytes. Everything read is validated before use as untrusted
input: names stay inside the folder, numbers are numbers, tensors are complete.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import (
    DTYPE_BYTES,
    CheckpointError,
    Shape,
    coverage_problem,
    load_json,
    state_problems,
)
from nanotrain_sharded_ckpt_v2.save_plan import Tensor

NAME = "MANIFEST.json"
FORMAT, VERSION = "nanotrain-sharded", 2
#: Maximum size of a manifest that is read. DeepSeek-V3 on 2048 ranks takes 11 MB.
LARGEST = 512 * 2**20

_SEAL, _END = ',\n"sha256": "', '"\n}\n'
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH = re.compile(r"[0-9a-f]{64}")


class OtherFormat(CheckpointError):
    """A checkpoint of another format version, which need not be damaged."""


#: Names of the files beside the manifest, as the next two functions make them.
BESIDE = re.compile(r"(shard|rank)-\d{5,}\.safetensors")


def shard_name(number: int) -> str:
    """Return the file of one shard of the tensors: that of a rank, but for its frozen weights."""
    return f"shard-{number:05d}.safetensors"


def frozen_name(rank: int, ranks: int) -> str:
    """Return the file of one rank's frozen weights: they are numbered after the shards of all ranks."""
    return shard_name(ranks + rank)


def streams_name(rank: int) -> str:
    """Return the file of one rank's random-number streams."""
    return f"rank-{rank:05d}.safetensors"


def key(name: str, offset: Shape) -> str:
    """Return the key of a box in its shard: ``layers.0.attn.q.weight@0,128``."""
    return f"{name}@{','.join(map(str, offset))}"


def name_of(key: str) -> str:
    """Return the name of the tensor that a box of a shard belongs to."""
    return key.rpartition("@")[0]


@attrs.define(frozen=True)
class File:
    """One file other than the manifest."""

    bytes: int
    sha256: str


@attrs.define(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    versions: Mapping[str, str]
    """Versions of the core, torch and this plugin that wrote it."""
    world_size: int
    layout: Mapping[str, Mapping[str, int]]
    """View -> dimension -> size."""
    previous: str | None
    """SHA-256 of the previous checkpoint in the folder."""
    meta: Mapping[str, Any]
    """The run's own JSON."""
    tensors: Mapping[str, Tensor]
    files: Mapping[str, File]


def write(manifest: Manifest) -> str:
    """Return the manifest as text, one line for each tensor and file, with its hash."""
    items = {"format": FORMAT, "version": VERSION} | {
        name: getattr(manifest, name)
        for name in ("step", "versions", "world_size", "layout", "previous", "meta")
    }
    lines = [f'"{name}": {_dump(value)}' for name, value in items.items()]
    lines.append('"tensors": ' + _lines({n: _tensor(t) for n, t in manifest.tensors.items()}))
    files = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in manifest.files.items()}
    lines.append('"files": ' + _lines(files))
    body = "{\n" + ",\n".join(lines)
    return f'{body}{_SEAL}{sha256(body.encode()).hexdigest()}"\n}}\n'


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _lines(table: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_dump(name)}: {_dump(value)}" for name, value in table.items()) + "\n}"


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": tensor.chunks}


# --- reading --------------------------------------------------------------------------------------


def seal_of(text: str) -> str:
    """Return the SHA-256 in the last line.

    Raises:
        ValueError: there is none, or it does not match the rest.
    """
    body, found, tail = text.rpartition(_SEAL)
    if not found or not _HASH.fullmatch(tail[:64]) or tail[64:] != _END:
        raise ValueError("its last line, with its SHA-256, is missing: it is not complete")
    if sha256(body.encode()).hexdigest() != tail[:64]:
        raise ValueError("its bytes do not match its SHA-256")
    return tail[:64]


def read_text(folder: Path) -> str:
    """Return the text of the manifest in ``folder``.

    Raises:
        CheckpointError: it is not a plain file, or too large.
    """
    path = folder / NAME
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing, or is no plain file")
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {LARGEST} are read")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from None


def apart(folder: Path, text: str) -> str:
    """Return how the manifest in ``folder`` differs from ``text``, as rank 0 has read it: empty if equal.

    A rank may read a local disk, or, on a shared one, a folder that has been set aside since. Its shards may
    have the same sizes, and each SHA-256 is verified by one rank only, so every rank compares the hash in the
    manifest's last line.
    """
    end = text[-len(_SEAL) - 64 - len(_END) :].encode()
    try:
        with (folder / NAME).open("rb") as file:
            file.seek(-len(end), os.SEEK_END)
            alike = file.read() == end
    except OSError as problem:
        return f"{folder / NAME} cannot be read: {problem.strerror or problem}"
    return "" if alike else f"{folder} is another checkpoint there than on rank 0"


def parse(text: str, folder: Path) -> Manifest:
    """Return the manifest of ``folder``, completely validated.

    Raises:
        OtherFormat: it has another format version.
        CheckpointError: it is damaged, or contains something impossible.
    """
    try:
        seal_of(text)
        return _parse(load_json(text), folder)
    except (ValueError, KeyError, TypeError) as problem:
        said = f"it lacks {problem}" if isinstance(problem, KeyError) else problem
        raise CheckpointError(f"{folder / NAME} is damaged: {said}") from None


def read(folder: Path) -> Manifest:
    """Read and validate the manifest of ``folder``."""
    return parse(read_text(folder), folder)


def _parse(table: Any, folder: Path) -> Manifest:
    if table["format"] != FORMAT or table["version"] != VERSION:
        raise OtherFormat(
            f"{folder / NAME} is of format {table['format']!r}, version {table['version']!r}; "
            f"expected {FORMAT!r}, version {VERSION}"
        )
    files = {_file_name(name): _file(name, entry) for name, entry in _table(table["files"], "files").items()}
    tensors = {
        name: _read_tensor(name, entry, files) for name, entry in _table(table["tensors"], "tensors").items()
    }
    found = Manifest(
        step=_count(table["step"], "step"),
        versions=_table(table["versions"], "versions"),
        world_size=_count(table["world_size"], "world_size"),
        layout={name: _sizes(view, name) for name, view in _table(table["layout"], "layout").items()},
        previous=table["previous"],
        meta=_table(table["meta"], "meta"),
        tensors=tensors,
        files=files,
    )
    if problem := next(_disagreements(found), ""):
        raise ValueError(problem)
    return found


def _disagreements(found: Manifest) -> Iterator[str]:
    """Yield contradictions between its parts."""
    yield from state_problems(found.meta, found.step)
    for view, sizes in found.layout.items():
        if prod(sizes.values()) != found.world_size:
            yield f"layout.{view} has {prod(sizes.values())} ranks, but world_size is {found.world_size}"
    if found.previous is not None and not (
        isinstance(found.previous, str) and _HASH.fullmatch(found.previous)
    ):
        yield f"previous is {found.previous!r}, expected a SHA-256 or null"
    if odd := next((name for name, value in found.versions.items() if not isinstance(value, str)), None):
        yield f"versions.{odd} is {found.versions[odd]!r}, expected a text"
    ranks = {streams_name(rank) for rank in range(min(found.world_size, len(found.files)))}
    shards = {shard_name(number) for tensor in found.tensors.values() for number, _, _ in tensor.chunks}
    if unknown := sorted(found.files.keys() - shards - ranks):
        yield f"it names {unknown[0]}, in which no tensor and no rank's streams are"


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is {value!r}, expected a number of 0 or more")
    return value


def _sizes(view: Any, name: str) -> dict[str, int]:
    return {dim: _count(size, f"layout.{name}.{dim}") for dim, size in _table(view, f"layout.{name}").items()}


def _file_name(name: str) -> str:
    if not _FILE.fullmatch(name) or not name.endswith(".safetensors"):
        raise ValueError(f"it names the file {name!r}; expected a plain name that ends with .safetensors")
    return name


def _file(name: str, entry: Any) -> File:
    found = File(_count(entry["bytes"], f"bytes of {name}"), entry["sha256"])
    if not isinstance(found.sha256, str) or not _HASH.fullmatch(found.sha256):
        raise ValueError(f"sha256 of {name} is {found.sha256!r}")
    return found


def _shape(value: Any, what: str) -> Shape:
    if not isinstance(value, list):
        raise ValueError(f"{what} is {value!r}, expected a list of numbers")
    return tuple(_count(number, what) for number in value)


def _read_tensor(name: str, entry: Any, files: Mapping[str, File]) -> Tensor:
    if entry["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"{name} is stored as {entry['dtype']!r}; known are {', '.join(DTYPE_BYTES)}")
    shape = _shape(entry["shape"], f"shape of {name}")
    chunks = [_chunk(name, chunk, files) for chunk in entry["chunks"]]
    problem = coverage_problem(shape, [(offset, size) for _, offset, size in chunks])
    if problem:
        raise ValueError(f"{name} is not complete: {problem}")
    return Tensor(entry["dtype"], shape, chunks)


def _chunk(name: str, chunk: Sequence[Any], files: Mapping[str, File]) -> tuple[int, Shape, Shape]:
    shard, offset, size = chunk
    if shard_name(_count(shard, f"shard of {name}")) not in files:
        raise ValueError(f"a block of {name} is in {shard_name(shard)}, which is not among its files")
    return shard, _shape(offset, f"offset of {name}"), _shape(size, f"block of {name}")
