"""Measures how long a message takes from one rank to the next, apart from the run's own messages."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from nanotrain_core.layout.mesh import Mesh

#: Bytes of a message: long enough to detect a link that has lost half of its width.
SIZE = 2**18
#: Number of messages, of which the fastest counts: a delay by a late rank is no property of the link.
TIMES = 3


def seconds_from_neighbor(mesh: Mesh) -> float:
    """Return how long a message of :data:`SIZE` bytes took from the rank before this one. Collective.

    All ranks send to the next at once, rank 0 receives from the last. Waits for the device.
    """
    own = torch.zeros(SIZE, dtype=torch.uint8, device=mesh.p2p_device)
    coming = torch.empty_like(own)
    after, before = (mesh.rank + 1) % mesh.world_size, (mesh.rank - 1) % mesh.world_size
    return min(_once(own, coming, after, before, mesh) for _ in range(TIMES))


def _once(own: torch.Tensor, coming: torch.Tensor, after: int, before: int, mesh: Mesh) -> float:
    mesh.barrier()
    began = time.perf_counter()
    with mesh.waits.collectives:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, coming, before)]
        ):
            work.wait()
        if coming.is_cuda:
            torch.cuda.synchronize(coming.device)
    return time.perf_counter() - began
