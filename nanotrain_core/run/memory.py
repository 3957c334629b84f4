"""Rejects what does not fit into memory, and names it: before allocation, or when an allocation fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from math import prod

import attrs
import torch
from torch import nn

from nanotrain_core.contracts import GradientSync, Optimizer, Precision
from nanotrain_core.errors import NanotrainError, expect_result, in_one_line
from nanotrain_core.layout.dtensors import local_of
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placements
from nanotrain_core.precision.quantized_storage import bytes_at_start, storage_of
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.run.host_memory import host_memory
from nanotrain_core.run.progress_bar import amount
from nanotrain_core.watch.progress import Progress

#: Parts of the texts of torch's out-of-memory errors that are not an ``OutOfMemoryError``.
SIGNS = ("can't allocate memory", "Storage size calculation overflowed")


def expect_weights_to_fit(
    parts: Iterable[nn.Module],
    placements: Placements,
    recipe: Recipe,
    mesh: Mesh,
) -> None:
    """Reject weights that are larger than all memory, before they are allocated. Collective.

    Raises:
        NanotrainError: on every rank, with ranks, host, sizes and keys.
    """

    def needed() -> int:
        sizes = {
            name: bytes_at_start(local_of(parameter))
            for part in parts
            for name, parameter in part.named_parameters()
            if name in placements  # one that is missing is an error of its own
        }
        return sum(sizes.values())

    _expect_room(needed, "weights", recipe, mesh)


def expect_training_to_fit(
    placed: Iterable[PlacedParameter],
    gradients: GradientSync,
    optimizer: Optimizer,
    precision: Precision,
    recipe: Recipe,
    mesh: Mesh,
) -> None:
    """Reject what a rank holds at the end of every backward pass if it is larger than all memory. Collective.

    That is without buckets and activations. On a CPU, Linux overcommits memory and kills the process that
    touches too much of it.

    Raises:
        NanotrainError: on every rank, with ranks, host, sizes and keys.
    """

    def needed() -> int:
        held = sum(storage_of(each.parameter).nbytes for each in placed)
        for piece in gradients.pieces():
            first, end = piece.span or (0, prod(piece.placement.shape))
            held += (end - first) * (precision.gradient_dtype or piece.parameter.dtype).itemsize
        name = f"optimizer {type(optimizer).__name__}"
        state = (block.tensor for block in expect_result(name, "blocks", optimizer.blocks(), Iterable))
        return held + sum(tensor.nbytes for tensor in state if tensor.device == mesh.device)

    _expect_room(needed, "weights, gradients and optimizer state", recipe, mesh)


def _expect_room(needed: Callable[[], int], what: str, recipe: Recipe, mesh: Mesh) -> None:
    """Compare with the memory of each device, or of the host that all ranks share; else of each rank's.

    ``needed``: returns the bytes of this rank; not called where no size is known.
    """
    device = mesh.device
    if device.type not in ("cpu", "cuda"):  # a dry run, or a device whose size is not known here
        return
    on_host = device.type == "cpu"
    total = host_memory().most if on_host else torch.cuda.get_device_properties(device).total_memory
    everyone = mesh.gather((needed(), total))
    found = {f"rank {rank}": pair for rank, pair in enumerate(everyone)}
    one_host = mesh.world_size > 1 and os.environ.get("LOCAL_WORLD_SIZE") == str(mesh.world_size)
    if one_host and (on_host or recipe.run.share_device):
        found = {f"all {mesh.world_size} ranks": (sum(taken for taken, _ in everyone), total)}
    for whose, (taken, most) in found.items():
        if taken > most > 0:
            has = f"{amount(taken, 'B')}, and there are {amount(most, 'B')} in all"
            raise NanotrainError(f"{what} of {whose} take {has}: {_advice(recipe)}")


def _advice(recipe: Recipe) -> str:
    config = recipe.model.config
    sizes = {field.name: getattr(config, field.name) for field in attrs.fields(type(config))}
    large = sorted((size, name) for name, size in sizes.items() if type(size) is int and size > 1)[:-6:-1]
    keys = ", ".join(f"model.{name} = {size}" for size, name in large)
    return f"lower {keys}; or split the model over ranks on more hosts or devices"


@contextlib.contextmanager
def explain_out_of_memory(recipe: Recipe, rank: int, progress: Progress) -> Iterator[None]:
    """Turn an allocation that fails before the end of the first step into an error that names what to change.

    Later failures may be transient: they keep their traceback, and ranks may be restarted.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        few = isinstance(problem, MemoryError | torch.OutOfMemoryError)
        early = progress.slow and progress.phase != "checkpoint"
        if not early or not (few or any(sign in str(problem) for sign in SIGNS)):
            raise
        batch = f"batch.microbatch = {recipe.batch.microbatch}, batch.length = {recipe.batch.length}"
        text = f"rank {rank} is out of memory before its first step is done: {in_one_line(problem, 300)}"
        raise NanotrainError(f"{text}; for a step, lower {batch}; {_advice(recipe)}") from None
