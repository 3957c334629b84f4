"""Ranks whose shares of a tensor differ in size still cut what all of them hold at the same elements."""

from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_zero12 import Zero12Config, flat
from nanotrain_zero12.flat import Flat
from nanotrain_zero12.sharded_gradients import ShardedGradients, group
from torch import nn

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.checkpoint.box_cover import coverage_problem
from nanotrain_core.contracts import Block
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement, placed_parameters
from nanotrain_core.layout.placement import place as place_whole
from nanotrain_core.pipeline.passes import Passes

# --- a share without elements ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_without_elements_is_in_no_bucket(stage, overlap):
    """Its arrival was a KeyError: a rank may hold none of the rows that are split over many."""
    mesh = Mesh(Grid(GridConfig()).layout(1))
    module = nn.ParameterList([torch.zeros(rows, 3) for rows in (2, 0)])
    sync = ShardedGradients()
    sync.config = Zero12Config(stage=stage, overlap=overlap)
    sync.attach(placed_parameters([module], place_whole([module], mesh.layout)), mesh, None, Passes())
    for _ in range(2):
        sync.last_microbatch(list(module.parameters()))
        sum((torch.ones(1, 3) @ weight.T).sum() for weight in module).backward()
        sync.microbatch_done(list(module.parameters()))
        sync.backward_done(list(module.parameters()))
        sync.finish()
        assert {piece.parameter for piece in sync.pieces()} == {module[0]}
        assert all(
            torch.equal(sync.gradient_of(p), torch.ones_like(sync.gradient_of(p))) for p in sync.pieces()
        )
        sync.zero()
        sync.gather_weights()
        sync.wait(list(module.parameters()))


# --- any shapes, any bucket size --------------------------------------------------------------------


def place(name, shape, kind, layout, rank):
    """Return where a rank's block of a parameter sits, as wrappers of each kind place it."""
    placement = Placement.whole(name, shape, layout, view="expert" if kind == "experts" else "dense")

    def split(axis, dim):
        index, count = layout.coordinate(rank, dim), layout.size(dim)
        return placement.split(axis, dim, index, count, uneven=True)

    match kind:
        case "rows":
            return split(0, "tp")
        case "columns":
            return split(1, "tp")
        case "experts":
            return split(0, "ep")
        case "partial":
            return placement.sum_over("tp")
        case "tied":
            last = layout.size("pp") - 1
            return attrs.evolve(split(0, "tp"), stages=(0, last) if last else ())
    return placement


def blocks_of(rank, parameters, layout, limit):
    """Return what a rank would save of the state of ``parameters``, without process groups."""
    held = []
    for name, (shape, kind, stage) in parameters.items():
        placement = place(name, shape, kind, layout, rank)
        if layout.coordinate(rank, "pp") in (placement.stages or (stage % layout.size("pp"),)):
            held.append(PlacedParameter(nn.Parameter(torch.empty(placement.shape)), placement))
    for (_, span, *_), members in group(held, SimpleNamespace(layout=layout)):
        ranks = layout.members(rank, span)
        index, size = ranks.index(rank), len(ranks)
        with mock.patch.multiple(
            flat.dist, get_rank=lambda _, index=index: index, get_world_size=lambda _, size=size: size
        ):
            buffer = Flat(members, mock.sentinel.group, torch.float32, limit)
        for piece, _ in buffer.pieces():
            yield from Block.of_piece("exp_avg", piece.weight, piece)


#: tp, pp, ep and dp of up to 16 ranks.
DEGREES = [(2, 1, 1, 2), (3, 1, 1, 2), (2, 1, 1, 3), (2, 2, 2, 2), (3, 1, 3, 3), (4, 1, 2, 2), (1, 2, 2, 4)]


@st.composite
def runs(draw):
    """Draw a layout and the parameters of a model: shape, kind, and stage."""
    tp, pp, ep, dp = draw(st.sampled_from(DEGREES))
    kinds = st.sampled_from(["whole", "rows", "columns", "experts", "partial", "tied"])
    shapes = st.tuples(st.integers(4, 9), st.integers(40, 99))
    drawn = draw(st.lists(st.tuples(shapes, kinds, st.integers(0, 1)), min_size=3, max_size=8))
    layout = Grid(GridConfig(pp=pp, tp=tp, ep=ep)).layout(tp * pp * dp)
    return layout, {f"p{number}": parameter for number, parameter in enumerate(drawn)}


@settings(deadline=None)
@given(runs(), st.integers(1_000, 20_000))
def test_distinct_blocks_of_all_ranks_tile_every_tensor(run, limit):
    layout, parameters = run
    boxes = defaultdict(set)
    for rank in range(layout.world_size):
        for block in blocks_of(rank, parameters, layout, limit):
            boxes[block.name].add((tuple(block.offset), tuple(block.tensor.shape)))
    wrong = {
        name: coverage_problem(shape, sorted(boxes[f"exp_avg/{name}"]))
        for name, (shape, *_) in parameters.items()
    }
    assert not any(wrong.values()), wrong
