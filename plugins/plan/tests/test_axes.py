"""Along which mesh dimension a collective is told to be."""

import pytest
from nanotrain_plan.comms import Links
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.hardware import find_hardware

from nanotrain_core.api import Layout, View


def layout(*, dp=1, cp=1, ep=1, edp=1):
    views = {"dense": View(("dp", "cp"), (dp, cp)), "expert": View(("edp", "ep"), (edp, ep))}
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
