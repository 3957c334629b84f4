from itertools import product
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Layout, View

degrees = st.fixed_dictionaries(
    {name: st.sampled_from([1, 2, 3, 4]) for name in ("pp", "cp", "tp", "ep", "etp")}
)


def test_sixteen_ranks_by_hand():
    """pp 2 x dp 2 x cp 1 x tp 4, and pp 2 x edp 2 x ep 4 x etp 1, drawn on paper."""
    layout = Grid(GridConfig(pp=2, tp=4, ep=4)).layout(16)
    assert layout.ranks(6, "tp") == (4, 5, 6, 7)
    assert layout.ranks(6, "dp") == (2, 6)
    assert layout.ranks(6, "pp") == (6, 14)
    assert layout.ranks(6, "dp", "tp") == tuple(range(8))
    assert layout.ranks(6, "ep") == (4, 5, 6, 7)
    assert layout.ranks(6, "edp") == (2, 6)
    assert (layout.coordinate(13, "pp"), layout.coordinate(13, "dp"), layout.coordinate(13, "tp")) == (
        1,
        1,
        1,
    )


def test_experts_fold_over_tensor_and_data_ranks():
    layout = Grid(GridConfig(tp=2, ep=4, etp=1)).layout(8)
    assert (layout.size("dp"), layout.size("edp")) == (4, 2)
    assert layout.ranks(0, "ep") == (0, 1, 2, 3)
    assert layout.ranks(0, "tp") == (0, 1)


def test_gradients_are_partial_over_dp_and_cp():
    assert Grid(GridConfig(cp=2)).layout(4).data_dims == ("dp", "cp", "edp", "ep")


@settings(max_examples=30, deadline=None)
@given(degrees, st.integers(1, 2))
def test_groups_of_each_dimension_partition_the_world(sizes, factor):
    world = factor * sizes["pp"] * lcm(sizes["cp"] * sizes["tp"], sizes["ep"] * sizes["etp"])
    layout = Grid(GridConfig(**sizes)).layout(world)
    assert layout.world_size == world
    for view in layout.views.values():
        for dim in view.dims:
            groups = {layout.ranks(rank, dim) for rank in range(world)}
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            assert {len(group) for group in groups} == {layout.size(dim)}
        places = {tuple(view.coordinate(rank, dim) for dim in view.dims) for rank in range(world)}
        assert places == set(product(*map(range, view.sizes)))


@given(degrees, st.integers(1, 64))
def test_a_refused_world_is_told_one_that_fits(sizes, world):
    grid = Grid(GridConfig(**sizes))
    try:
        layout = grid.layout(world)
    except ValueError as error:
        suggested = [int(word) for word in str(error).partition("; ")[2].split() if word.isdigit()]
        assert len(suggested) == 2
        for size in suggested:
            assert grid.layout(size).world_size == size
    else:
        assert layout.world_size == world


def test_degree_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"pp 1 x cp 1 x tp 4 = 4 does not divide 6; 4 or 8 ranks would do"):
        Grid(GridConfig(tp=4)).layout(6)
    with pytest.raises(
        ValueError, match=r"pp 2 x ep 4 x etp 1 = 8 does not divide 4; 8 or 16 ranks would do"
    ):
        Grid(GridConfig(pp=2, ep=4)).layout(4)


def test_hybrid_sharding_by_hand():
    """Stages of 8 ranks: dp 4, of which neighbors share a copy of the weights, and tp 2; ep 2 in these."""
    layout = Grid(GridConfig(pp=2, dp_shard=2, tp=2, ep=2)).layout(16)
    assert layout.sizes["dense_shard"] == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert layout.sizes["expert_shard"] == {"pp": 2, "edp_replicate": 2, "edp_shard": 2, "ep": 2, "etp": 1}
    assert (layout.ranks(9, "dp_shard"), layout.ranks(9, "dp_replicate")) == ((9, 11), (9, 13))
    assert (layout.ranks(9, "edp_shard"), layout.ranks(9, "edp_replicate")) == ((9, 11), (9, 13))
    assert layout.ranks(9, "dp_replicate", "dp_shard") == layout.ranks(9, "dp") == (9, 11, 13, 15)
    assert {*layout.data_dims} >= {"dp_replicate", "dp_shard", "edp_replicate", "edp_shard"}
    assert layout.row_dims == ("dp",)


def test_a_copy_of_the_experts_lies_within_one_of_the_other_weights():
    assert Grid(GridConfig(dp_shard=2, ep=8)).layout(8).sizes["expert_shard"]["edp_replicate"] == 1
    with pytest.raises(ValueError, match=r"of 8, dp_shard 2 x cp 1 x tp 1 = 2 .* dp_shard = 4 or a multiple"):
        Grid(GridConfig(dp_shard=2, ep=4)).layout(8)
    assert Grid(GridConfig(dp_shard=4, ep=4)).layout(8).sizes["expert_shard"]["edp_shard"] == 1
    with pytest.raises(ValueError, match="dp_shard 3 x cp 1 x tp 1 = 3 does not divide 8; 6 or 9 ranks"):
        Grid(GridConfig(dp_shard=3)).layout(8)


def test_dimensions_of_no_common_view_are_refused():
    layout = Layout({"a": View(("x", "y"), (2, 3)), "b": View(("z",), (6,))})
    assert layout.size() == 1
    assert layout.coordinate(5, "x", "y") == 5
    with pytest.raises(KeyError, match="no view of the layout has all of"):
        layout.size("x", "z")


def test_a_dimension_that_a_topology_lacks_has_degree_one():
    layout = Layout({"a": View(("x", "y"), (2, 3)), "b": View(("z",), (6,))})
    assert layout.degree() == layout.degree("pp") == 1
    assert (layout.degree("pp", "y"), layout.degree("x", "z")) == (3, 12)
