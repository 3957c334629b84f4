"""A mesh of 16,384 ranks: which groups a rank makes, against coordinates counted out one by one."""

from functools import cache

import numpy as np
import pytest

from benchmarks import mesh
from nanotrain_core.testing import run_ranks

SAMPLE = [0, 1, 8, 1023, 1024, 5461, 8191, 12_288, 16_383]

#: pp, dp, tp and pp, edp, ep of every rank: pp 16, tp 8, ep 64.
DENSE = np.arange(16_384).reshape(16, 128, 8)
EXPERT = np.arange(16_384).reshape(16, 16, 64)


def groups_of(ranks):
    return [mesh.groups(rank) for rank in ranks]


@cache
def made():
    (found,) = run_ranks(groups_of, 1, SAMPLE, backend=None)
    return dict(zip(SAMPLE, found, strict=True))


@pytest.mark.parametrize("rank", SAMPLE)
def test_a_rank_makes_the_groups_it_is_in_and_no_others(rank):
    pp, dp, tp = (int(place[0]) for place in np.where(rank == DENSE))
    _, edp, ep = (int(place[0]) for place in np.where(rank == EXPERT))
    expected = {
        "pp": DENSE[:, dp, tp],
        "dp": DENSE[pp, :, tp],
        "tp": DENSE[pp, dp, :],
        "edp": EXPERT[pp, :, ep],
        "ep": EXPERT[pp, edp, :],
        "dp+tp": DENSE[pp].flatten(),
    }
    if pp in (0, 15):
        expected["dp+pp0&15"] = DENSE[[0, 15], :, tp].flatten()
    assert made()[rank] == {name: tuple(map(int, ranks)) for name, ranks in expected.items()}


def test_number_and_size_of_groups_are_those_documented():
    sizes = {name: len(ranks) for name, ranks in made()[0].items()}
    assert sizes == {"pp": 16, "dp": 128, "tp": 8, "edp": 16, "ep": 64, "dp+tp": 1024, "dp+pp0&15": 256}
