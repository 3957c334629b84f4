"""The weights of a checkpoint alone, for ``--weights`` and ``nanotrain convert``, a block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanotrain_core.api import DTYPE_NAMES, CheckpointError, Shape
from nanotrain_core.api.torch import SavedWeights
from nanotrain_sharded_ckpt_v2 import folders, manifest
from nanotrain_sharded_ckpt_v2.listing import newest
from nanotrain_sharded_ckpt_v2.manifest import Manifest, key, shard_name


def open_weights(path: Path) -> SavedWeights | None:
    """Open a checkpoint, or the newest of a run folder, for its weights; None if it has another format.

    Raises:
        CheckpointError: it is damaged. An older one, which may be whole, is opened by its path alone.
    """
    folder = newest(path)
    if folder is None:
        return None
    found = folders.open_manifest(folder)
    if "model" not in found.meta:
        raise CheckpointError(f"{folder / manifest.NAME} does not say of which model its weights are")
    weights, averages = ShardedWeights(folder, found), ShardedWeights(folder, found, "ema/")
    return SavedWeights(found.meta["model"], weights, found.step, found.meta.get("recipe", ""), averages)


class ShardedWeights:
    """See :class:`~nanotrain_core.contracts.WeightReader`."""

    def __init__(self, path: Path, found: Manifest, kind: str = "") -> None:
        self.path, self.manifest, self.kind = path, found, kind
        self._open: dict[str, Any] = {}
        of_kind = {n.removeprefix(kind): tensor for n, tensor in found.tensors.items() if n.startswith(kind)}
        own = {name: tensor for name, tensor in of_kind.items() if "/" not in name}
        self.shapes: Mapping[str, Shape] = {name: tensor.shape for name, tensor in own.items()}
        self.dtypes: Mapping[str, torch.dtype] = {
            name: getattr(torch, DTYPE_NAMES[tensor.dtype]) for name, tensor in own.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Assemble one block from the boxes that intersect it."""
        begin = tuple(part.start for part in index)
        shape = tuple(part.stop - part.start for part in index)
        block = torch.empty(shape, dtype=self.dtypes[name])
        name = self.kind + name
        for number, offset, size in self.manifest.tensors[name].chunks:
            common = [
                (max(b, o), min(b + n, o + m)) for b, n, o, m in zip(begin, shape, offset, size, strict=True)
            ]
            if all(first < last for first, last in common):
                here = tuple(slice(i - b, j - b) for (i, j), b in zip(common, begin, strict=True))
                there = tuple(slice(i - o, j - o) for (i, j), o in zip(common, offset, strict=True))
                block[here] = self._box(shard_name(number), key(name, offset), there)
        return block

    def _box(self, file: str, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            opened = self._open[file]
            found: torch.Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
            return found
        except (OSError, SafetensorError) as problem:
            raise CheckpointError(f"{self.path / file} cannot be read: {problem}") from None

    def damage(self) -> Sequence[str]:
        """Compare all files with their SHA-256."""
        return folders.damage(self.path, full=True)
