"""What other ranks hold of the matrices, for a rank that cannot ask them: of a dry run, on ``meta``.

Where their blocks are follows from this rank's block, if it is one that a known rule cuts; which ranges of a
block they update, from the gradient sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import attrs

from nanotrain_core.api import Layout, Shape
from nanotrain_core.api.torch import GradientSync, KnowsPieces, Piece, Placement, shard_range


@attrs.define(frozen=True)
class Cut:
    """How the ranks along a mesh dimension divide an axis of a tensor."""

    dim: str
    axis: int
    chunks: bool
    """Whether as ``torch.chunk`` does, which FSDP2 follows: the last ranks may have less, or nothing. Else as
    :meth:`Placement.split`."""

    def range_of(self, length: int, index: int, count: int) -> tuple[int, int]:
        """Return the begin and the end of the ``index``-th of ``count`` parts."""
        if not self.chunks:
            return shard_range(length, index, count)
        chunk = -(-length // count)
        return min(length, chunk * index), min(length, chunk * (index + 1))


def block_of(shape: Shape, cuts: Sequence[Cut], layout: Layout, rank: int) -> tuple[Shape, Shape]:
    """Return the offset and the shape of a rank's block of a tensor that is cut, one cut after the other."""
    offset, size = [0] * len(shape), list(shape)
    for cut in cuts:
        begin, end = cut.range_of(size[cut.axis], layout.coordinate(rank, cut.dim), layout.size(cut.dim))
        offset[cut.axis] += begin
        size[cut.axis] = end - begin
    return tuple(offset), tuple(size)


def find_cuts(block: Placement, layout: Layout, rank: int) -> Sequence[Cut]:
    """Return cuts that leave ``rank`` this block, the dimension that varies fastest first; () if none do.

    Several may: they leave all ranks blocks of equal sizes then, unless axes do not divide.
    """
    varying = [
        d for d in reversed(layout.views[block.view].dims) if d in block.sharded and layout.size(d) > 1
    ]
    axes = product(range(len(block.shape)), repeat=len(varying))
    # Axes in the order of a view's dimensions: experts are divided among ep, and their widths among etp.
    for chosen in (each[::-1] for each in axes):
        for chunks in product((False, True), repeat=len(varying)):
            cuts = [Cut(*each) for each in zip(varying, chosen, chunks, strict=True)]
            if block_of(block.global_shape, cuts, layout, rank) == (block.offset, block.shape):
                return cuts
    return ()


class OtherRanks:
    """The pieces of matrices on other ranks of this pipeline stage."""

    def __init__(
        self, blocks: Sequence[Placement], gradients: GradientSync, layout: Layout, rank: int
    ) -> None:
        """``blocks``: this rank's matrices, before their ranges were divided."""
        self.gradients, self.layout = gradients, layout
        self.blocks = {block.name: block for block in blocks}
        known: dict[tuple[object, ...], Sequence[Cut]] = {}
        self.cuts: dict[str, Sequence[Cut]] = {}
        self._pieces: dict[int, list[Piece]] = {}
        for block in blocks:  # many are alike
            key = block.view, block.sharded, block.global_shape, block.offset, block.shape
            if key not in known:
                known[key] = find_cuts(block, layout, rank)
            self.cuts[block.name] = known[key]

    def placements(self) -> Iterator[Placement]:
        """Yield the placement that pieces of each matrix have, on whatever rank there are any."""
        ranges = isinstance(self.gradients, KnowsPieces)
        yield from (each.sharded_over_summed() if ranges else each for each in self.blocks.values())

    def pieces_of(self, rank: int) -> Sequence[Piece]:
        """Return the pieces of a rank. A block that follows no known rule is taken to be this rank's."""
        if rank not in self._pieces:
            sync = self.gradients
            pieces = sync.pieces_of(rank) if isinstance(sync, KnowsPieces) else sync.pieces()
            own = (piece for piece in pieces if piece.placement.name in self.blocks)
            self._pieces[rank] = [self._moved(piece, rank) for piece in own]
        return self._pieces[rank]

    def _moved(self, piece: Piece, rank: int) -> Piece:
        """Return a piece of the block that ``rank`` has in place of this rank's."""
        where, cuts = piece.placement, self.cuts[piece.placement.name]
        if not cuts:
            return piece
        offset, shape = block_of(where.global_shape, cuts, self.layout, rank)
        placement, span = attrs.evolve(where, offset=offset, shape=shape), piece.span
        if span is not None and shape != where.shape:
            size, end = prod(shape), prod(where.shape)
            span = min(span[0], size), size if span[1] == end else min(span[1], size)
        return Piece(piece.parameter, placement, span)
