"""Computes the same microbatch on every data-parallel replica, without a trace in the step being taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Computed
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.dtensors import is_dtensor
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.moe.routing import bytes_not_counted, counting_routers
from nanotrain_core.pipeline.executor import Executor


def replay(
    executor: Executor,
    mesh: Mesh,
    microbatches: Sequence[Batch],
    loss_factors: Mapping[str, torch.Tensor],
    replica: int,
) -> Iterator[Computed]:
    """Yield what this rank's stages compute for the first microbatch of data-parallel rank ``replica``.

    See :meth:`~nanotrain_core.contracts.UpdateReport.replay`.
    """
    parts = executor.stages.values()
    if any(is_dtensor(each) for part in parts for each in part.parameters()):
        raise NanotrainError(
            "a microbatch cannot be replayed: parameters are DTensors, whose gradients torch reduces itself"
        )
    batch = _broadcast(microbatches[0], mesh, replica)
    with _step_unchanged(executor, mesh.device):
        yield from executor.compute(batch, loss_factors)


def _broadcast(batch: Batch, mesh: Mesh, replica: int) -> Batch:
    """Broadcast a batch from data-parallel rank ``replica``: token ids, a few kilobytes."""
    rows = mesh.layout.row_dims
    group = mesh.group(*rows)
    if group is None:
        return batch
    shared = [batch.to(torch.device("cpu"))]
    with mesh.waits.collectives:
        dist.broadcast_object_list(shared, mesh.ranks(*rows)[replica], group=group)
    return shared[0].to(mesh.device)


@contextmanager
def _step_unchanged(executor: Executor, device: torch.device) -> Iterator[None]:
    """Restore counts of tokens and bytes, and torch's RNG streams; within, all ranks have the same stream."""
    parts = executor.stages.values()
    routers = counting_routers(parts).values()
    loads = [router.take_load() for router in routers]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), bytes_not_counted(parts):
            torch.manual_seed(0)
            yield
    finally:
        for router, load in zip(routers, loads, strict=True):
            router.take_load()
            router.add_load(load)
