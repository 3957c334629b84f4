"""Converts a checkpoint from one format to another: weights, optimizer state, and all else it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from nanotrain_core.checkpoint.info import DTYPE_NAMES, CheckpointInfo
from nanotrain_core.contracts import Block, Checkpoint, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.progress_bar import show_progress


def convert_checkpoint(registry: Registry, kind: str, saved: CheckpointInfo, wanted: str, out: Path) -> Path:
    """Write ``saved`` to the new folder ``out`` in another format. One process holds all of it in memory.

    The result is the checkpoint of a one-rank run: random-number streams of several ranks are dropped.

    Raises:
        CheckpointError: it is damaged, or ``out`` already exists.
    """
    if out.exists():
        raise CheckpointError(f"{out} is there already: name a new folder")
    with show_progress("verifying the checkpoint"):
        problems = saved.verify()
    if problems:
        raise CheckpointError("; ".join(problems))
    source, target = (_build(registry, use) for use in (kind, wanted))
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    blocks = []
    for name, tensor in saved.describe()["tensors"].items():
        shape, dtype = tuple(tensor["shape"]), getattr(torch, DTYPE_NAMES[tensor["dtype"]])
        blocks.append(Block(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype)))
    source.open(out / "checkpoints", mesh)  # opening must touch nothing next to the source checkpoint
    state = source.load(str(saved.path.resolve()), TrainState(blocks, {}, {}))
    assert state is not None
    target.open(out / "checkpoints", mesh)
    target.save(saved.step, state)
    (report,) = target.advance(wait=True)
    return report.path


def _build(registry: Registry, use: str) -> Checkpoint:
    built: Checkpoint = registry.build(Selection("checkpoint", use, registry.get("checkpoint", use).config()))
    return built
