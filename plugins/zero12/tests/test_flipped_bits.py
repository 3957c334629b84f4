"""A bit that flips in one rank's copy of the weights is found before the update that would overwrite it."""

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.flipped import Flip, train_flipped

RANKS = 4

#: Two microbatches a rank, of which the second comes after the flip, too.
WATCHED = {
    "monitor": [{"use": "replicas"}],
    "run": {"steps": 4},
    "batch": {"sequences": 4 * RANKS, "microbatch": 2},
}


@pytest.mark.parametrize(
    ("culprit", "own"),
    [
        pytest.param(0, True, id="0-own"),
        pytest.param(3, False, id="3-another's"),
        pytest.param(0, False, id="0-another's", marks=pytest.mark.full),
        pytest.param(3, True, id="3-own", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("stage", "kernels"),
    [
        pytest.param(1, "auto", marks=pytest.mark.full),
        (2, "auto"),
        pytest.param(2, "torch", marks=pytest.mark.full),
    ],
    ids=["1", "2", "2-sockets"],
)
def test_the_flipped_rank_is_named_on_all(stage, kernels, culprit, own):
    config, around = {"bucket_mb": 0.01, "stage": stage}, {"kernels": {"use": kernels}}
    case = Case("optimizer", use="zero12", config=config, topology={"dp": RANKS}, overrides=around)
    found = run_ranks(train_flipped, RANKS, case, WATCHED, Flip(2, culprit, own=own))
    others = ", ".join(str(rank) for rank in range(RANKS) if rank != culprit)
    name = found[culprit].flipped
    assert name
    text = f"step 3: {name} has other bits on rank {culprit} than on ranks {others}, which agree"
    assert [each.text for each in found] == [text] * RANKS
