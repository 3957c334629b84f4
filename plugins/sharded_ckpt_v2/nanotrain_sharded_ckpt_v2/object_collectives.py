"""Communication between ranks about a checkpoint: small Python objects, never tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nanotrain_core.api import CheckpointError
from nanotrain_core.api.torch import Mesh


def gather_to_first(value: Any, mesh: Mesh) -> list[Any]:
    """Gather: return every rank's value on rank 0, an empty list elsewhere."""
    if mesh.world_size == 1:
        return [value]
    everyone: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    with mesh.waits.collectives:
        dist.gather_object(value, everyone, dst=0)
    return everyone or []


def broadcast_from_first(value: Any, mesh: Mesh) -> Any:
    """Broadcast: return rank 0's value everywhere."""
    if mesh.world_size == 1:
        return value
    box = [value if mesh.rank == 0 else None]
    with mesh.waits.collectives:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def scatter_from_first(values: list[Any], mesh: Mesh) -> Any:
    """Scatter: return the value that rank 0 has for this rank."""
    if mesh.world_size == 1:
        return values[0]
    mine: list[Any] = [None]
    with mesh.waits.collectives:
        dist.scatter_object_list(mine, values if mesh.rank == 0 else None, src=0)
    return mine[0]


def agree(problem: str, mesh: Mesh, kind: type[CheckpointError] = CheckpointError) -> None:
    """Gather: raise on every rank if any has a ``problem``, the first rank's with the number of others.

    Raises:
        CheckpointError: of that ``kind``, naming the rank.
    """
    said = [(rank, text) for rank, text in enumerate(mesh.gather(problem)) if text]
    if said:
        rank, text = said[0]
        where = f"rank {rank}: " if mesh.world_size > 1 else ""
        others = f" ({len(said)} ranks in all)" if len(said) > 1 else ""
        raise kind(f"{where}{text}{others}")
