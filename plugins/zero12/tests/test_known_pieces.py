"""A rank knows which ranges the other ranks of its pipeline stage update."""

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run
from nanotrain_core.testing.variants_of_kinds import EXPERTS, SPREAD


def known_and_own(case):
    """Return the ranges that this rank knows of each rank, and its own."""
    run = make_run(case, {})
    ranks = range(run.mesh.layout.world_size)
    return [told(run.gradients.pieces_of(rank)) for rank in ranks], told(run.gradients.pieces())


def told(pieces):
    return [(piece.name, sorted(piece.placement.sharded)) for piece in pieces]


@pytest.mark.parametrize("kind", ["optimizer", "parallel"])
@pytest.mark.parametrize("topology", [{"dp": 3}, {"dp": 4, "ep": 2}])
def test_ranges_of_other_ranks_are_known(kind, topology):
    """Of experts two ranks at a time have the same ones, and each a range of them."""
    config = {"stage": 1, "bucket_mb": 0.0013}  # buckets end within tensors
    around = {**EXPERTS, "parallel": [SPREAD]} if "ep" in topology else {}
    case = Case(kind, use="zero12", config=config, topology=topology, overrides=around)
    ranks = run_ranks(known_and_own, case.world_size, case)
    own = [pieces for _, pieces in ranks]
    assert all(own)
    assert len({tuple(name for name, _ in pieces) for pieces in own}) == len(own)
    assert [known for known, _ in ranks] == [own] * len(own)
