"""Replicas whose initial weights differ in a last bit start from the same bits after composing."""

import torch
import torch.distributed as dist

from nanotrain_core.layout.initialization import equalize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement
from nanotrain_core.testing.pool import run_ranks


def start_apart_then_equalize():
    """Return this rank's block after starting from its own rank number: dp 2 x tp 2, split over tp."""
    rank = dist.get_rank()
    layout = Layout({"dense": View(("dp", "tp"), (2, 2))})
    mesh = Mesh(layout, rank=rank)
    everywhere = Placement.whole("a", (4,), layout)
    whole = PlacedParameter(torch.nn.Parameter(torch.full((4,), float(rank))), everywhere)
    split = Placement.whole("b", (4,), layout).split(0, "tp", mesh.coordinate("tp"), 2)
    block = PlacedParameter(torch.nn.Parameter(torch.full((2,), float(rank))), split)
    mesh.agree_on_groups([whole.placement.replica_span(layout), split.replica_span(layout)])
    equalize([whole, block], mesh)
    return whole.parameter[0].item(), block.parameter[0].item()


def test_every_holder_of_a_block_gets_the_first_holders_bits():
    assert run_ranks(start_apart_then_equalize, 4) == [(0.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
