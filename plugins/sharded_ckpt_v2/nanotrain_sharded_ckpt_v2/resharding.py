"""Resharding on load: this layout's blocks, read from shards that another layout saved.

The planner of torch's distributed checkpoints (DCP) finds which part of which shard goes where. Each
wanted tensor is passed to ``DefaultLoadPlanner`` as :class:`Wanted`, with its boxes on this rank. torch's
storage and metadata files are not used: they are pickles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from nanotrain_core.api import DTYPE_NAMES, CheckpointError, box_slices
from nanotrain_core.api.torch import Block, dequantize, requantize
from nanotrain_sharded_ckpt_v2 import shard
from nanotrain_sharded_ckpt_v2.blocks import code
from nanotrain_sharded_ckpt_v2.folders import forms_of
from nanotrain_sharded_ckpt_v2.manifest import Manifest, key, shard_name
from nanotrain_sharded_ckpt_v2.save_plan import Tensor


class Wanted:
    """One tensor's blocks on this rank, in the interface of a planner."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.blocks[0].global_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes to fill."""
        return [_chunk(tuple(block.offset), tuple(block.tensor.shape)) for block in self.blocks]


def _chunk(offset: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


def _metadata(tensor: Tensor) -> TensorStorageMetadata:
    chunks = [_chunk(offset, shape) for _, offset, shape in tensor.chunks]
    properties = TensorProperties(dtype=getattr(torch, DTYPE_NAMES[tensor.dtype]))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


def misfits(manifest: Manifest, blocks: Sequence[Block], wanted: Collection[str]) -> list[str]:
    """Return why the saved tensors do not fill ``blocks``, by name, shape or dtype, and which no rank wants.

    These would be lost with the next save: such as the moments of a parameter that is no longer trained.
    """
    found = [text for block in blocks for text in _misfit(manifest.tensors.get(block.name), block)]
    rest = sorted(manifest.tensors.keys() - {*wanted})
    return [*found, *(f"it holds {name}, which this run has no place for" for name in rest)]


def _misfit(saved: Tensor | None, block: Block) -> Iterator[str]:
    if saved is None:
        yield f"it has no tensor {block.name}"
    elif saved.shape != tuple(block.global_shape):
        yield f"{block.name} has shape {saved.shape}, expected {tuple(block.global_shape)}"
    elif saved.dtype != code(block.name, block.tensor):
        yield f"{block.name} is stored as {saved.dtype}, expected {code(block.name, block.tensor)}"


class ReadPlan:
    """The reads of one rank: planned and verified in the files before any live state is modified."""

    def __init__(self, folder: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
        """Plan the reads.

        Raises:
            CheckpointError: a file that would be read differs from the manifest.
        """
        self.folder, self.manifest = folder, manifest
        self.wanted: dict[str, Wanted] = {}
        for block in blocks:
            self.wanted.setdefault(block.name, Wanted([]))
            self.wanted[block.name].blocks = [*self.wanted[block.name].blocks, block]
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = Metadata({name: _metadata(manifest.tensors[name]) for name in self.wanted})
        planner.set_up_planner({}, metadata)
        planner.state_dict = dict(self.wanted)  # set_up_planner replaces values that are not tensors by None
        self.items: dict[tuple[str, int], list[tuple[str, ReadItem]]] = {}
        """By name and number of the block that they fill; each with the file that is read."""
        for item in planner.create_local_plan().items:
            number = manifest.tensors[item.storage_index.fqn].chunks[_index(item)][0]
            filled = item.dest_index.fqn, item.dest_index.index or 0
            self.items.setdefault(filled, []).append((shard_name(number), item))
        self._look()

    def _look(self) -> None:
        forms = forms_of(self.manifest)
        for name in dict.fromkeys(name for items in self.items.values() for name, _ in items):
            known = self.manifest.files[name]  # as this rank sees it: another one has read and verified it
            problem = shard.damage(self.folder, name, known, full=False)
            problem = problem or shard.misfit(self.folder / name, forms[name])
            if problem:
                raise CheckpointError(problem)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy from the files into the live tensors, one after the other, by the file that each begins with.

        Raises:
            CheckpointError: a file has been removed meanwhile.
        """
        with ExitStack() as files:
            opened: dict[str, Any] = {}
            for (fqn, index), items in sorted(self.items.items(), key=lambda each: each[1][0][0]):
                tensor = self.wanted[fqn].blocks[index].tensor
                values = dequantize(tensor)
                for name, item in items:
                    try:
                        if name not in opened:
                            opened[name] = files.enter_context(safe_open(self.folder / name, framework="pt"))
                        self._copy(opened[name], item, values)
                    except (OSError, SafetensorError) as problem:
                        raise CheckpointError(f"{self.folder / name} cannot be read: {problem}") from None
                requantize(tensor, values)

    def _copy(self, file: Any, item: ReadItem, target: torch.Tensor) -> None:
        _, offset, _ = self.manifest.tensors[item.storage_index.fqn].chunks[_index(item)]
        box = key(item.storage_index.fqn, offset)
        if not target.shape:
            target.copy_(file.get_tensor(box))
            return
        there = box_slices(item.storage_offsets, item.lengths)
        target[box_slices(item.dest_offsets, item.lengths)].copy_(file.get_slice(box)[there])


def _index(item: ReadItem) -> int:
    """Return the index of the box of its tensor that an item reads from."""
    assert item.storage_index.index is not None
    return item.storage_index.index
