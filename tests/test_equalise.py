"""Replicas whose initial weights differ in a last bit start from the same bits after composing."""

import torch
import torch.distributed as dist
from nanotrain_fp4_master.blocks import NF4Blocks
from nanotrain_fp4_master.packing import FourBits

from nanotrain_core.layout.initialization import equalize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement
from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize, unquantized
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


def start_apart_packed_then_equalize():
    """Return a packed weight's values, and those that its masters are made of."""
    rank = dist.get_rank()
    layout = Layout({"dense": View(("dp",), (2,))})
    mesh = Mesh(layout, rank=rank)
    numbers = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    weight = torch.nn.Parameter(PackedWeight.of(numbers, FourBits(NF4Blocks(64))))
    placed = PlacedParameter(weight, Placement.whole("a", (4, 64), layout))
    mesh.agree_on_groups([placed.placement.replica_span(layout)])
    equalize([placed], mesh)
    return dequantize(weight), unquantized(weight).clone()


def test_every_holder_of_a_packed_weight_gets_the_first_holders_bits():
    (first, exact), other = run_ranks(start_apart_packed_then_equalize, 2)
    numbers = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(exact, numbers)
    assert torch.equal(first, FourBits(NF4Blocks(64)).rounded(numbers.flatten()).view(4, 64))
    assert all(map(torch.equal, other, (first, exact)))
