"""Tensors in safetensors files: one, or shards with an index, in Hugging Face's layout.

Files are written tensor by tensor, since shapes are known beforehand: peak memory is the largest tensor.
Source of the format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from safetensors import SafetensorError, safe_open

from nanotrain_core.checkpoint.info import DTYPE_NAMES
from nanotrain_core.checkpoint.run_state import load_json, read_json
from nanotrain_core.errors import CheckpointError
from nanotrain_core.run.files import write_atomically, write_text_atomically
from nanotrain_core.run.progress_bar import Advance, show_progress

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: A file name without folders: otherwise an index could make this process read any file of the machine.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*\.safetensors")

#: Dtypes that weights may be stored in, and their safetensors codes.
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, DTYPE_NAMES[code]) for code in ("F64", "F32", "F16", "BF16")
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Tensors(Protocol):
    """The tensors of a folder, read block by block."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Return the safetensors codes of their dtypes."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor."""
        ...


class Shards:
    """The tensors of a folder, opened for lazy reading.

    Raises:
        CheckpointError: the folder has no safetensors files, one is missing or damaged, or it has two sets.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """Safetensors codes: they include 8-bit formats, which cannot be read."""
        self._files: dict[str, Any] = {}
        for path in _files(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path} is missing or damaged: it is no plain file")
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - the file itself cannot be iterated
                if name in self.shapes:
                    raise CheckpointError(f"{path} holds {name}, which another file of the folder holds too")
                found = file.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(found.get_shape()), found.get_dtype()
                self._files[name] = file
        except (OSError, SafetensorError) as problem:
            raise CheckpointError(f"{path} is missing or damaged: {problem}") from None

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor."""
        file = self._files[name]
        tensor: torch.Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return tensor


def _files(folder: Path) -> Sequence[Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            names = sorted(set(load_json(read_json(index))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(f"{index} is damaged: {problem!r}") from None
        odd = next((name for name in names if not _PLAIN.fullmatch(str(name))), None)
        if odd is not None or not names:
            said = f"names the file {odd!r}" if names else "names no file"
            raise CheckpointError(f"{index} {said}; expected files beside it that end with .safetensors")
        if single.is_file() and SINGLE not in names:  # transformers reads this file, not the index
            raise CheckpointError(
                f"{folder} has both {SINGLE} and {INDEX}, which names other files: remove the one not meant"
            )
        return [folder / name for name in names]
    if not single.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: other formats are not read")
    return [single]


@attrs.define(frozen=True, eq=False)
class Entry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Returns its values, in any dtype."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(folder: Path, entries: Iterable[Entry], limit: int) -> int:
    """Write ``entries`` in their order into files of at most ``limit`` bytes each; return how many files.

    A tensor above the limit is written to a file of its own.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + entry.nbytes > limit:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    numbered = (f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    names = [SINGLE] if count == 1 else list(numbered)
    with show_progress("writing", sum(entry.nbytes for shard in shards for entry in shard), "B") as advance:
        for name, shard in zip(names, shards, strict=True):
            write_atomically(folder / name, lambda path, shard=shard: _write(path, shard, advance))  # type: ignore[misc]
    if count > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return count


def write_tensors(path: Path, entries: Sequence[Entry]) -> None:
    """Write ``entries`` into one file."""
    write_atomically(path, lambda path: _write(path, entries, lambda _: None))


def _write(path: Path, shard: Sequence[Entry], advance: Advance) -> None:
    """Write eight bytes for the header's length, the header as JSON, then all tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        begin, end = end, end + entry.nbytes
        code = CODES[entry.dtype]
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            tensor = entry.read().to(entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, entry.name
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            advance(entry.nbytes)
