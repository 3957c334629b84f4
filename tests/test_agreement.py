"""Ranks that would run different things find out before they talk."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from nanotrain_core.errors import LaunchError
from nanotrain_core.launch.agreement import agree

FACTS = {"nanotrain-core": "0.1.0", "nanotrain-ddp": "0.1.0", "recipe hash": "abc"}


def outcomes(*facts):
    store = dist.HashStore()

    def ask(rank):
        try:
            agree(store, rank, len(facts), facts[rank])
        except LaunchError as error:
            return str(error)
        return "equal"

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(ask, range(len(facts))))


def test_equal_facts_pass_everywhere():
    assert outcomes(FACTS, FACTS, FACTS) == ["equal"] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({**FACTS, "nanotrain-ddp": "0.2.0"}, "nanotrain-ddp is 0.2.0 there and 0.1.0 on rank 0"),
        ({"nanotrain-core": "0.1.0", "recipe hash": "abc"}, "nanotrain-ddp is missing there and 0.1.0"),
        ({**FACTS, "recipe hash": "xyz"}, "recipe hash is xyz there and abc on rank 0"),
    ],
)
def test_every_rank_learns_who_differs_and_in_what(other, text):
    found = outcomes(FACTS, FACTS, other)
    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 on ")
    assert text in found[0]
