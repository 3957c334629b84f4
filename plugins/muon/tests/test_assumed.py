"""What other ranks hold, from the block of one rank alone."""

import pytest
from nanotrain_muon.assumed import OtherRanks, block_of, find_cuts
from torch import nn

from nanotrain_core.api import Layout, View
from nanotrain_core.api.torch import Piece, Placement

DENSE = View(("pp", "dp", "tp"), (1, 3, 2))
LAYOUT = Layout({"dense": DENSE, "expert": View(("pp", "edp", "ep", "etp"), (1, 1, 3, 2))})


def chunk(length, index, count):
    """Return the begin and the end of what ``torch.chunk`` gives the ``index``-th rank."""
    size = -(-length // count)
    return min(length, size * index), min(length, size * (index + 1))


def block(kind, rank):
    dp, tp = LAYOUT.coordinate(rank, "dp"), LAYOUT.coordinate(rank, "tp")
    ep, etp = LAYOUT.coordinate(rank, "ep"), LAYOUT.coordinate(rank, "etp")
    match kind:
        case "rows":
            return Placement.whole("w", (10, 8), LAYOUT).split(0, "tp", tp, 2)
        case "columns":
            return Placement.whole("w", (10, 8), LAYOUT).split(1, "tp", tp, 2)
        case "chunks":
            return Placement.whole("w", (7, 8), LAYOUT).cut(0, "dp", *chunk(7, dp, 3))
        case "chunks without a row":
            return Placement.whole("w", (4, 8), LAYOUT).cut(0, "dp", *chunk(4, dp, 3))
        case "chunks of rows":
            return block("rows", rank).cut(0, "dp", *chunk(5, dp, 3))
        case "chunks of columns":
            return block("columns", rank).cut(0, "dp", *chunk(10, dp, 3))
        case "widths of experts":
            whole = Placement.whole("w", (6, 4, 8), LAYOUT, view="expert")
            return whole.split(0, "ep", ep, 3).split(1, "etp", etp, 2)


KINDS = ["rows", "columns", "chunks", "chunks without a row", "chunks of rows", "chunks of columns"]


@pytest.mark.parametrize("kind", [*KINDS, "widths of experts"])
def test_blocks_of_all_ranks_follow_from_that_of_any(kind):
    blocks = [block(kind, rank) for rank in range(6)]
    for rank, own in enumerate(blocks):
        cuts = find_cuts(own, LAYOUT, rank)
        assert cuts
        found = [block_of(own.global_shape, cuts, LAYOUT, other) for other in range(6)]
        assert found == [(each.offset, each.shape) for each in blocks]


def test_a_block_that_follows_no_rule_is_taken_to_be_on_all_ranks():
    own = Placement.whole("w", (10, 8), LAYOUT).cut(0, "dp", 0, 9)
    assert find_cuts(own, LAYOUT, 0) == ()
    (piece,) = OtherRanks([own], Whole(own), LAYOUT, 0).pieces_of(3)
    assert piece.placement == own


class Whole:
    """A gradient sync whose pieces are blocks."""

    def __init__(self, placement):
        self.placement = placement

    def pieces(self):
        return [Piece(nn.Parameter(), self.placement)]


class Ranges(Whole):
    """One that shards over dp, and knows it."""

    def pieces_of(self, rank):
        first = 10 * LAYOUT.coordinate(rank, "dp")
        return [Piece(nn.Parameter(), self.placement.sharded_over_summed(), (first, first + 10))]


def test_ranges_are_those_of_the_gradient_sync_in_the_block_of_each_rank():
    own = Placement.whole("w", (6, 10), LAYOUT).split(0, "tp", 0, 2)
    others = OtherRanks([own], Ranges(own), LAYOUT, 0)
    assert [piece.boxes for rank in range(6) for piece in others.pieces_of(rank)] == [
        [((row + first, 0), (1, 10))] for row in range(3) for first in (0, 3)
    ]
    assert [each.sharded for each in others.placements()] == [{"dp", "tp"}]
