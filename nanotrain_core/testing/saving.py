"""Code that ranks run to save and load a case's run, filled with values that identify a step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.checkpoint.tensor_boxes import box_slices
from nanotrain_core.compose import Run
from nanotrain_core.contracts import Block, Checkpoint, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.precision.quantized_storage import dequantize
from nanotrain_core.run import random_state
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.probe import make_run, rank

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder, deleted afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def open_state(case: Case, folder: Path, *, fill: float | None = None) -> tuple[Checkpoint, TrainState]:
    """Return the case's checkpoint, opened on ``folder``, and the state of a newly composed run.

    Args:
        fill: overwrite every tensor with this value.
    """
    run = make_run(case, {"optimizer": ADAMW})
    assert run.checkpoint is not None
    run.checkpoint.open(folder, run.mesh)
    state = state_of(run)
    if fill is not None:
        for block in state.blocks:
            block.tensor.fill_(fill)
    return run.checkpoint, state


def state_of(run: Run) -> TrainState:
    """Return a run's weights, optimizer state and random streams, with some JSON."""
    blocks = [Block.of("", dequantize(p.parameter), p.placement) for p in run.placed]
    blocks += run.optimizer.blocks()
    streams = random_state.capture(torch.device("cpu"))
    return TrainState(blocks, {"step": 0, "text": "ünïcode", "list": [1, 2.5]}, streams)


def numbered(state: TrainState, seed: int) -> TrainState:
    """Fill every tensor with values that depend on its name and position, and write ``seed`` to the meta."""
    for block in state.blocks:
        whole_tensor = torch.randn(block.global_shape, generator=torch.Generator().manual_seed(seed))
        block.tensor.copy_(whole_tensor[box_slices(block.offset, block.tensor.shape)])
    return attrs.evolve(state, meta={**state.meta, "step": seed})


def save(checkpoint: Checkpoint, step: int, state: TrainState) -> None:
    """Save completely: without waiting, files may still be being written when this returns."""
    checkpoint.save(step, state)
    checkpoint.advance(wait=True)


def save_steps(case: Case, folder: Path, steps: list[int]) -> list[Block]:
    """Save a different state at each of ``steps`` and return the blocks of the last."""
    checkpoint, state = open_state(case, folder)
    for step in steps:
        save(checkpoint, step, numbered(state, step))
    return list(state.blocks)


@attrs.define(frozen=True, eq=False)
class Loaded:
    """The result of a load on one rank."""

    blocks: list[Block]
    meta: dict[str, Any]
    streams: dict[str, torch.Tensor]


def load(case: Case, folder: Path, which: str, copy_to: Path | None = None) -> Loaded | None:
    """Load into a run with different values; save the loaded state again in ``copy_to``."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    found = checkpoint.load(which, state)
    if found is not None and copy_to is not None:
        checkpoint.open(copy_to, make_run(case, {}).mesh)
        again = attrs.evolve(state, meta=found.meta, rank_tensors=found.rank_tensors)
        save(checkpoint, found.meta["step"], again)
    if found is None:
        return None
    return Loaded(list(state.blocks), dict(found.meta), dict(found.rank_tensors))


@attrs.define(frozen=True)
class Refusal:
    """The result of a load that should fail."""

    error: str
    """Text of the CheckpointError, empty if there was none."""
    problems: list[str]
    """What ``verify`` said."""
    touched: list[str]
    """Tensors that changed all the same."""


def try_to_load(case: Case, folder: Path, *, reshape: bool = False) -> Refusal:
    """Load step 1 and return how it failed; with ``reshape``, into a run whose last tensor is larger."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    if reshape:
        *others, last = state.blocks
        wider = (last.global_shape[0] + 1, *last.global_shape[1:])
        state = attrs.evolve(state, blocks=[*others, attrs.evolve(last, global_shape=wider)])
    try:
        checkpoint.load("1", state)
        error = ""
    except CheckpointError as refused:
        error = str(refused)
    problems = list(checkpoint.verify(1)) if rank() == 0 else []
    touched = [block.name for block in state.blocks if (block.tensor != -1.0).any()]
    return Refusal(error, problems, touched)


def wait_for_all() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def named(blocks: Sequence[Block]) -> dict[str, torch.Tensor]:
    """Return a rank's blocks by name and offset."""
    return {f"{block.name}@{block.offset}": block.tensor for block in blocks}
