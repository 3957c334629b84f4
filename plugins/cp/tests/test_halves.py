"""Which queries ranks compute with all-gathered keys: each once, and as many scores on every rank."""

from itertools import chain

import pytest
from nanotrain_cp.all_gather import Halves

from nanotrain_core.api.torch import shard_range


class Ranks:
    """The ranks of a group, without communication."""

    def __init__(self, size, index):
        self.size, self.index = size, index

    def edges(self, length):
        return [shard_range(length, index, self.size) for index in range(self.size)]


def computed(size, length):
    """Return, for each rank, the positions of the queries that it computes."""
    found = []
    for index in range(size):
        halves = Halves(Ranks(size, index), length)
        begin, _ = halves.ranks.edges(length)[index]
        own, other = halves.ends
        assert own == begin + halves.kept
        found.append([*range(begin, own), *range(other - halves.received, other)])
        assert halves.received == Halves(Ranks(size, halves.opposite), length).sent
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_query_is_computed_once(size):
    for length in range(size, 5 * size):
        assert sorted(chain(*computed(size, length))) == [*range(length)]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_compute_as_many_scores_of_a_causal_mask(size):
    scores = [sum(at + 1 for at in each) for each in computed(size, 6 * size)]
    assert scores == [sum(range(1, 6 * size + 1)) / size] * size
