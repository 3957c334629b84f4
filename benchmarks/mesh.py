"""How long one rank of a large run takes to lay out the world and make its process groups.

torch's "fake" backend stands in for the other ranks: what is timed is this rank's own work, without the
connections of a real backend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.startup import Wait
from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh

RANKS = 16_384
DEGREES = GridConfig(pp=16, tp=8, ep=64)

#: What the parameters of a DeepSeek-V3 ask for beside single dimensions, with sequence parallelism: norms
#: are summed over all data and tensor ranks, the table that first and last stage hold also over those two.
WANTED = (Span(("dp", "tp")), Span(("dp",), (0, DEGREES.pp - 1)))


def measure(*, rounds: int) -> list[Wait]:
    """Time ``rounds`` ranks, spread over the world."""
    seconds = tuple(_build(rank)[0] for rank in sample(rounds))
    degrees = f"pp {DEGREES.pp} x dp {RANKS // DEGREES.pp // DEGREES.tp} x tp {DEGREES.tp}, ep {DEGREES.ep}"
    return [Wait(f"mesh of {RANKS} ranks: {degrees}", "groups made", 5.0, seconds)]


def sample(count: int) -> Iterator[int]:
    """Yield ranks from the first to the last."""
    return (rank * (RANKS - 1) // max(1, count - 1) for rank in range(count))


def groups(rank: int) -> dict[str, tuple[int, ...]]:
    """Return the members of every process group that ``rank`` makes, by the dimensions it is along."""
    return _build(rank)[1]


def _build(rank: int) -> tuple[float, dict[str, tuple[int, ...]]]:
    dist.init_process_group("fake", rank=rank, world_size=RANKS)
    try:
        began = time.perf_counter()
        mesh = Mesh(Grid(DEGREES).layout(RANKS), rank=rank)
        mesh.create_groups(WANTED)
        seconds = time.perf_counter() - began
        spans = [*(Span((dim,)) for dim in mesh.layout.dims), *WANTED]
        made = ((str(span), mesh.group_of(span)) for span in spans)
        return seconds, {name: tuple(dist.get_process_group_ranks(g)) for name, g in made if g is not None}
    finally:
        dist.destroy_process_group()
