"""A tied embedding of the first and the last stage, where the ranks' collectives block them."""

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

CASE = Case(
    "parallel",
    use="ddp",
    topology={"pp": 2},
    overrides={
        "model": {"use": "transformer", "tied": True},
        "schedule": {"use": "1f1b"},
        "kernels": {"use": "torch"},
    },
)


def test_a_tied_embedding_is_reduced_after_backward_of_all_stages():
    """The last stage would wait for the first one's gradient, which waits for the last one's backward."""
    run_ranks(train, 2, CASE, {}, timeout=60, check_collectives=True)
