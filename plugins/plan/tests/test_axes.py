"""Along which mesh dimension a collective is told to be, and which share of it is hidden."""

import pytest
from nanotrain_plan.comms import Links, ranks_along
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.hardware import find_hardware

from nanotrain_core.api import Layout, View


def layout(*, pp=1, dp=1, cp=1, ep=1, edp=1):
    views = {
        "dense": View(("pp", "dp", "cp"), (pp, dp, cp)),
        "expert": View(("pp", "edp", "ep"), (pp, edp, ep)),
    }
    return Layout(views, data_dims=("dp", "cp", "edp", "ep"), sequence_dims=("cp",))


@pytest.mark.parametrize(
    ("degrees", "ranks", "axis"),
    [
        ({"cp": 2, "edp": 2}, (0, 1), "cp"),
        ({"cp": 2, "dp": 2, "edp": 2, "ep": 2}, (0, 1), "cp+ep"),  # the same ranks: whose it is, is not known
        ({"cp": 2, "dp": 2, "ep": 4}, (0, 1), "cp"),
        ({"cp": 2, "dp": 2, "ep": 4}, (0, 1, 2, 3), "ep"),
        ({"dp": 4, "ep": 4}, (0, 1, 2, 3), "ep"),
        ({"dp": 4, "edp": 4}, (0, 1, 2, 3), "dp"),
    ],
)
def test_an_all_to_all_is_that_of_shared_sequences_or_of_experts(degrees, ranks, axis):
    links = Links(find_hardware("h100"), layout(**degrees))
    assert links.axis(Collective("all_to_all", ranks, 1)) == axis


@pytest.mark.parametrize(
    ("degrees", "ranks", "axis"),
    [
        ({"cp": 4, "dp": 2, "ep": 2, "edp": 4}, (0, 1), "cp"),  # ep has the same two ranks
        ({"cp": 4, "dp": 2, "edp": 8}, (4, 7), "cp"),  # from the last to the first
        ({"cp": 2, "pp": 2, "edp": 2}, (1, 3), "pp"),
    ],
)
def test_a_message_is_along_the_dimension_that_tells_its_ranks_apart(degrees, ranks, axis):
    links = Links(find_hardware("h100"), layout(**degrees))
    assert links.axis(Collective("send", ranks, 1)) == axis
    assert ranks_along(axis, "send", layout(**degrees)) == ((0, 2) if axis == "pp" else (0, 1))


@pytest.mark.parametrize(
    ("degrees", "op", "ranks", "overlap"),
    [
        ({"dp": 2, "cp": 2, "edp": 4}, "reduce_scatter", (0, 1, 2, 3), 0.9),  # world
        ({"dp": 2, "cp": 2, "pp": 2, "edp": 4}, "reduce_scatter", (0, 1, 2, 3), 0.9),  # dp+cp
        ({"dp": 2, "cp": 2, "pp": 2, "edp": 4}, "all_gather", (0, 1, 2, 3), 0.9),
        ({"dp": 2, "cp": 2, "edp": 4}, "all_gather", (0, 1), 0.0),  # keys and values along cp
        ({"dp": 2, "cp": 2, "edp": 4}, "all_to_all", (0, 1), 0.0),
        ({"cp": 4, "edp": 4}, "reduce_scatter", (0, 1, 2, 3), 0.9),  # no other dimension has replicas
        ({"cp": 4, "edp": 4}, "all_to_all", (0, 1, 2, 3), 0.0),
        ({"dp": 4, "cp": 2, "ep": 2, "edp": 4}, "reduce_scatter", (0, 2, 4, 6), 0.9),  # edp or dp
        ({"dp": 4, "edp": 4}, "all_reduce", (0, 1, 2, 3), 0.9),
        ({"pp": 4}, "all_reduce", (0, 3), 0.9),  # a tied parameter's gradient; of a message pp is hidden
        ({"pp": 4}, "send", (0, 1), 1.0),
    ],
)
def test_gradient_sync_along_several_axes_is_hidden_as_that_of_dp(degrees, op, ranks, overlap):
    links = Links(find_hardware("h100"), layout(**degrees))
    found = Collective(op, ranks, 10**9)
    assert links.exposed(found) == pytest.approx((1 - overlap) * links.seconds(found))


def test_the_slowest_group_along_an_axis_counts_and_not_that_of_rank_0():
    """Of 24 ranks with tp 6 on nodes of 8, ranks 6 to 11 are two on one node and four on the next."""
    h100, size = find_hardware("h100"), 10**9
    layout = Layout({"dense": View(("dp", "tp"), (4, 6))}, data_dims=("dp",), sequence_dims=())
    found = Links(h100, layout).seconds(Collective("all_reduce", (0, 1, 2, 3, 4, 5), size))
    two_nics = 1e9 * h100.links.achieved * 2 * h100.links.inter_gb_s
    assert found == pytest.approx(2 * 5 / 6 * size / two_nics, rel=1e-2)  # without latency


@pytest.mark.parametrize("ranks", [8, 64, 128])
def test_nvlink_connects_the_nodes_of_a_rack(ranks):
    """Nodes of a GB200 NVL72 have 4 GPUs, which reach those of the others as fast."""
    gb200, size = find_hardware("gb200"), 10**12
    assert gb200.devices_per_node == 4
    layout = Layout({"dense": View(("dp",), (ranks,))}, data_dims=("dp",), sequence_dims=())
    found = Links(gb200, layout).seconds(Collective("all_gather", tuple(range(ranks)), size))
    links = gb200.links
    rate = links.intra_gb_s if ranks <= 64 else min(links.intra_gb_s, 64 * links.inter_gb_s)
    assert found == pytest.approx((ranks - 1) / ranks * size / (1e9 * links.achieved * rate), rel=1e-2)


def test_a_message_to_another_rack_takes_one_nic():
    gb200, size = find_hardware("gb200"), 10**12
    layout = Layout({"dense": View(("pp",), (128,))}, data_dims=(), sequence_dims=())
    links, rates = Links(gb200, layout), gb200.links
    within = Links(gb200, Layout({"dense": View(("pp",), (64,))}, data_dims=(), sequence_dims=()))
    assert links.seconds(Collective("send", (0, 1), size)) == pytest.approx(
        size / (1e9 * rates.achieved * rates.inter_gb_s), rel=1e-2
    )
    assert within.seconds(Collective("send", (0, 1), size)) == pytest.approx(
        size / (1e9 * rates.achieved * rates.intra_gb_s), rel=1e-2
    )


def test_a_message_between_nodes_counts_where_some_stages_share_a_node():
    """Of 8 stages with tp 2 on nodes of 8, the stages 3 and 4 are on different nodes."""
    h100, size = find_hardware("h100"), 10**9
    layout = Layout({"dense": View(("pp", "tp"), (8, 2))}, data_dims=(), sequence_dims=())
    one_nic = 1e9 * h100.links.achieved * h100.links.inter_gb_s
    for ranks in ((0, 2), (6, 8), (13, 15)):
        found = Links(h100, layout).seconds(Collective("send", ranks, size))
        assert found == pytest.approx(size / one_nic, rel=1e-2)
    within = Layout({"dense": View(("pp", "tp"), (2, 4))}, data_dims=(), sequence_dims=())
    found = Links(h100, within).seconds(Collective("send", (0, 4), size))
    assert found == pytest.approx(size / (1e9 * h100.links.achieved * h100.links.intra_gb_s), rel=1e-2)


def test_a_ring_is_as_slow_as_its_slowest_link():
    """Of 4 ranks of cp with tp 4 on nodes of 8, the second and the third are on different nodes."""
    h100, size = find_hardware("h100"), 10**9
    layout = Layout({"dense": View(("cp", "tp"), (4, 4))}, data_dims=("cp",), sequence_dims=("cp",))
    one_nic = 1e9 * h100.links.achieved * h100.links.inter_gb_s
    found = Links(h100, layout).seconds(Collective("send", (0, 4), size))
    assert found == pytest.approx(size / one_nic, rel=1e-2)
