"""One buffer for the weights of many parameters, split into buckets of which each rank owns an equal range.

A parameter is a view into its buffer, so weights that other ranks updated can be received directly into
the model, and a float32 range is its own master. A buffer has rows of :data:`ALIGN` weights, in the storage
form of the precision: packed weights are also sent packed. Bucket boundaries are independent of parameter
boundaries: a large parameter is in several buckets, and each rank's range of a bucket has pieces of a few.

Source: the partition of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.api.torch import RANGE, Piece, PlacedParameter, memory_like, move_into

#: A parameter, and a rank's range of a bucket, begins at a multiple of this many elements of the buffer. So
#: ranges are split where the contract requires, and begin on cache lines.
ALIGN = RANGE


def cut(total: int, limit: int, ranks: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each bucket of a buffer with ``total`` elements; the last may extend past it.

    Every bucket is at most ``limit`` elements long and divides into equal, aligned ranges.

    >>> cut(200, 128, 2)
    [(0, 128), (128, 256)]
    """
    unit = ranks * ALIGN
    length = max(unit, limit // unit * unit)
    padded = -(-total // unit) * unit
    return [(start, min(start + length, padded)) for start in range(0, padded, length)]


@attrs.define(frozen=True, eq=False)
class ParameterSlice:
    """The elements of a parameter in a bucket."""

    parameter: nn.Parameter
    source: slice
    """Range of the flattened parameter."""
    target: slice
    """Range of the bucket."""


@attrs.define(eq=False)
class Bucket:
    """The unit of one reduce-scatter and one all-gather."""

    slices: Sequence[ParameterSlice]
    weights: torch.Tensor
    """Weights of all ranks' ranges, flat, in storage form: a view of the buffer."""
    own: slice
    """This rank's range of the bucket, in elements of parameters."""
    length: int
    """Length in elements of parameters, and of the gradients that are sent."""
    shard: torch.Tensor
    """The sum of gradients in this rank's range."""
    summed: bool = False
    """Whether :attr:`shard` holds a sum of this step: the next one is accumulated."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those with elements in this bucket."""
        return [part.parameter for part in self.slices]


class Flat:
    """Parameters whose gradients the same ranks sum, in the order in which backward reaches them."""

    def __init__(
        self,
        members: Sequence[PlacedParameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        limit: int,
    ) -> None:
        """Move ``members`` into a buffer. A bucket has at most ``limit`` bytes of gradient in ``dtype``."""
        self.members, self.group, self.dtype = members, group, dtype
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.starts = list(running_total(padded(member.parameter.numel()) for member in members))
        bounds = cut(self.starts[-1], limit // dtype.itemsize, self.ranks)
        length, first = bounds[-1][1], members[0].parameter
        self.weights = memory_like(first, length // ALIGN)
        for start, member in zip(self.starts, members, strict=False):
            move_into(member.parameter, self.weights[start // ALIGN :])
        shard = torch.zeros(length // self.ranks, dtype=dtype, device=first.device)
        self.buckets = [self._bucket(start, stop, shard) for start, stop in bounds]

    def _bucket(self, start: int, stop: int, shard: torch.Tensor) -> Bucket:
        own = (stop - start) // self.ranks
        slices = [
            ParameterSlice(member.parameter, slice(a - at, b - at), slice(a - start, b - start))
            for member, at, a, b in self._within(start, stop)
        ]
        mine = slice(self.rank * own, (self.rank + 1) * own)
        weights = self.weights[start // ALIGN : stop // ALIGN].view(-1)
        return Bucket(slices, weights, mine, stop - start, shard[start // self.ranks :][:own])

    def _within(self, start: int, stop: int) -> Iterator[tuple[PlacedParameter, int, int, int]]:
        """Yield each member in elements ``start`` to ``stop``: its offset, and which of them belong to it."""
        for member, at in zip(self.members, self.starts, strict=False):
            a, b = max(start, at), min(stop, at + member.parameter.numel())
            if a < b:
                yield member, at, a, b

    def pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield this rank's pieces, bucket by bucket, each with its range of the summed gradient."""
        for piece, bucket, part in self.pieces_of(self.rank):
            yield piece, bucket.shard[part]

    def pieces_of(self, rank: int) -> Iterator[tuple[Piece, Bucket, slice]]:
        """Yield the pieces of a rank of the group, each with its bucket and its range of the rank's range."""
        placements = {member.parameter: member.placement.sharded_over_summed() for member in self.members}
        for bucket in self.buckets:
            start, stop = (bucket.length // self.ranks * (rank + by) for by in (0, 1))
            for part in bucket.slices:
                a, b = max(part.target.start, start), min(part.target.stop, stop)
                if a < b:
                    back = part.source.start - part.target.start
                    piece = Piece(part.parameter, placements[part.parameter], (a + back, b + back))
                    yield piece, bucket, slice(a - start, b - start)


def padded(length: int) -> int:
    """Return the padded size of a parameter of ``length`` elements: up to where the next may begin."""
    return -(-length // ALIGN) * ALIGN


def running_total(lengths: Iterator[int] | Sequence[int]) -> Iterator[int]:
    """Yield the offset of each of consecutive ranges, and the end of the last."""
    total = 0
    yield total
    for length in lengths:
        total += length
        yield total
