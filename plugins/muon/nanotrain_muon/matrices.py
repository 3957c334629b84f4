"""Which ranks hold which parts of which matrices: read from their pieces, or assumed where there is one rank.

Ranks may hold blocks of a matrix (tensor parallelism, ``fsdp2``) and ranges of these (``zero12``). Stacked
experts are matrices of their own, of which a rank of expert parallelism has some whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import attrs
import torch

from nanotrain_core.api import Layout, NanotrainError, Shape, Span
from nanotrain_core.api.torch import Block, Mesh, Piece, Placement, shard_range

#: First row, first column, rows, columns of a part of a matrix.
Box = tuple[int, int, int, int]


@attrs.define(frozen=True, order=True)
class Matrix:
    """A parameter of two dimensions, or one expert of a stack."""

    name: str
    expert: int
    """Its index in the stack of all; 0 of a parameter that is no stack."""


#: Of each rank, by its number, the boxes it holds.
Holdings = Mapping[int, Mapping[Matrix, Sequence[Box]]]


@attrs.define(frozen=True)
class Part:
    """Where a rank has a box of a matrix."""

    matrix: Matrix
    box: Box
    gradient: int
    """Index of its piece's gradient; -1 of a part that is only assumed."""
    start: int | None
    """Its first element, of a flat range."""
    index: int | None
    """Its place in this rank's stack, of a whole block of one."""

    @property
    def elements(self) -> int:
        """Their number."""
        return self.box[2] * self.box[3]

    def of(self, gradients: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the part [rows, columns], a view of its gradient; one that is assumed is as ``like``."""
        rows, columns = self.box[2:]
        if self.gradient < 0:  # a planner counts the memory of a tensor when it is made: this takes none
            return like.new_empty(0).resize_(rows, columns)
        gradient = gradients[self.gradient]
        if self.start is not None:
            return gradient[self.start : self.start + rows * columns].view(rows, columns)
        return gradient if self.index is None else gradient[self.index]


def matrices_at(offset: Shape, shape: Shape) -> Iterator[tuple[int, Box]]:
    """Yield the expert and the box of each matrix in a box of a parameter."""
    (row, column), (rows, columns) = offset[-2:], shape[-2:]
    experts = (0,) if len(shape) == 2 else range(offset[0], offset[0] + shape[0])
    for expert in experts:
        yield expert, (row, column, rows, columns)


def parts_of(pieces: Sequence[Piece]) -> list[Part]:
    """Return the parts of matrices in pieces."""
    found = []
    for number, piece in enumerate(pieces):
        name, flat = piece.placement.name, piece.span is not None
        shape = (piece.span[1] - piece.span[0],) if piece.span else piece.placement.shape
        stacked, start = len(piece.placement.global_shape) == 3, 0
        for block in Block.of_piece("", torch.empty(shape, device="meta"), piece):
            boxes = matrices_at(block.offset, tuple(block.tensor.shape))
            for index, (expert, box) in enumerate(boxes):
                if elements := box[2] * box[3]:
                    place = (start, None) if flat else (None, index if stacked else None)
                    found.append(Part(Matrix(name, expert), box, number, *place))
                    start += elements
    return found


def boxes_of(parts: Sequence[Part]) -> dict[Matrix, list[Box]]:
    """Return the boxes of each matrix."""
    found: dict[Matrix, list[Box]] = defaultdict(list)
    for part in parts:
        found[part.matrix].append(part.box)
    return dict(found)


def several(dims: Collection[str], view: str, layout: Layout) -> tuple[str, ...]:
    """Return those of ``dims`` that have several ranks, in the order of their view."""
    return tuple(dim for dim in layout.views[view].dims if dim in dims and layout.size(dim) > 1)


class Survey:
    """Finds the ranks among which matrices are exchanged, and what each of them holds."""

    def __init__(
        self, pieces: Sequence[Piece], blocks: Sequence[Placement], mesh: Mesh, *, share: bool
    ) -> None:
        """Ask all ranks. Collective over the world.

        Args:
            pieces: of this rank's matrices.
            blocks: of this rank's matrices, before their ranges were divided.
            mesh: of the run.
            share: whether ranks that hold the same parts exchange matrices, too.

        Raises:
            NanotrainError: the ranks of a stage do not have all of a matrix.
        """
        self.mesh, self.layout, self.share = mesh, mesh.layout, share
        self.blocks = {block.name: block for block in blocks}
        self.parts = parts_of(pieces)
        self.shapes: dict[str, Shape] = {}
        """Of whole parameters."""
        self.held: dict[Span, dict[int, dict[Matrix, list[Box]]]] = defaultdict(lambda: defaultdict(dict))
        """By span, what each of its ranks holds, also of matrices that this rank has nothing of."""
        if mesh.device.type == "meta":  # nothing can be asked
            self._assume(ranges=any(piece.span is not None for piece in pieces))
        else:
            self._ask(pieces)
        mesh.agree_on_groups(span for span in self.held if span)

    def _note(self, span: Span, rank: int, matrix: Matrix, boxes: Sequence[Box]) -> None:
        if boxes and rank in self.layout.members(self.mesh.rank, span):
            self.held[span][rank][matrix] = list(boxes)

    # --- asked ------------------------------------------------------------------------------------

    def _ask(self, pieces: Sequence[Piece]) -> None:
        along: dict[str, set[str]] = defaultdict(set)
        own = {(each.placement.view, self._asked_along(each.placement)) for each in pieces}
        for theirs in self.mesh.gather(own):
            for view, dims in theirs:
                along[view] |= dims
        spans = {view: Span(several(along[view], view, self.layout)) for view in sorted(along)}
        self.mesh.create_groups([span for span in spans.values() if span])
        for view, span in spans.items():
            here = {each.placement.name: each.placement for each in pieces if each.placement.view == view}
            boxes = boxes_of([part for part in self.parts if part.matrix.name in here])
            told = self.mesh.gather((boxes, here), *span.dims) if span else [(boxes, here)]
            ranks = self.layout.members(self.mesh.rank, span)
            placements = {name: each for _, theirs in told for name, each in theirs.items()}
            self.shapes |= {name: each.global_shape for name, each in placements.items()}
            self._divide({r: theirs for r, (theirs, _) in zip(ranks, told, strict=True)}, placements, span)

    def _asked_along(self, placement: Placement) -> frozenset[str]:
        """Return the dimensions along which other ranks may hold parts of the same matrices."""
        replicated = placement.summed | placement.same
        return placement.sharded | replicated if self.share else placement.sharded

    def _divide(self, holdings: Holdings, placements: Mapping[str, Placement], asked: Span) -> None:
        """Note what ranks hold, by the span of parameters that are sharded along the same dimensions."""
        sorts: dict[frozenset[str], dict[Matrix, dict[int, Sequence[Box]]]]
        sorts = defaultdict(lambda: defaultdict(dict))
        for rank, boxes in holdings.items():
            for matrix, found in boxes.items():
                sorts[placements[matrix.name].sharded][matrix][rank] = found
        for sharded in sorted(sorts, key=sorted):
            holders = sorts[sharded]
            span = self._span(holders, asked)
            if self.share:
                dims = {*span.dims, *asked.dims} - (sharded - {*span.dims})
                span = Span(several(dims, placements[min(holders).name].view, self.layout))
            for matrix, held in holders.items():
                for rank, some in held.items():
                    self._note(span, rank, matrix, some)

    def _span(self, holders: Mapping[Matrix, Mapping[int, Sequence[Box]]], asked: Span) -> Span:
        """Return the ranks along the dimensions along which parts of a matrix differ."""
        found = {
            dim
            for matrix, held in holders.items()
            for rank, boxes in held.items()
            if self._lacks(matrix, boxes)
            for dim in asked.dims
            if any(held.get(other, boxes) != boxes for other in self.layout.ranks(rank, dim))
        }
        for dims in (tuple(dim for dim in asked.dims if dim in found), asked.dims):
            groups = {self.layout.members(rank, Span(dims)) for held in holders.values() for rank in held}
            lacking = {
                matrix
                for ranks in groups
                for matrix, held in holders.items()
                if not held.keys().isdisjoint(ranks)
                and self._lacks(matrix, {box for rank in ranks for box in held.get(rank, ())})
            }
            if not lacking:
                return Span(dims)
        raise NanotrainError(
            f"muon: the ranks of a pipeline stage do not have all of {min(lacking).name}, as its optimizer "
            "state is sharded among several stages; expected a layer of one stage, or no sharding (ddp)"
        )

    def _lacks(self, matrix: Matrix, boxes: Collection[Box]) -> bool:
        """Return whether different boxes are less than a whole matrix."""
        return sum(rows * columns for _, _, rows, columns in boxes) < prod(self.shapes[matrix.name][-2:])

    # --- assumed ----------------------------------------------------------------------------------

    def _assume(self, *, ranges: bool) -> None:
        """Have ranks hold equal rows of what is divided among them: only sizes matter."""
        self.shapes = {name: block.global_shape for name, block in self.blocks.items()}
        self.parts = []
        for name, block in self.blocks.items():
            dims = {*_dividing(block, self.layout), *(block.summed if ranges else ())}
            divided = self.layout.members(self.mesh.rank, Span(several(dims, block.view, self.layout)))
            dims |= block.summed | block.same if self.share else set()
            span, (rows, columns) = Span(several(dims, block.view, self.layout)), block.global_shape[-2:]
            for expert, _ in matrices_at(block.offset, block.shape):
                for number, rank in enumerate(self.layout.members(self.mesh.rank, span)):
                    first, last = shard_range(rows, number % len(divided), len(divided))
                    boxes = [(first, 0, last - first, columns)] if last > first else []
                    self._note(span, rank, Matrix(name, expert), boxes)
                    if rank == self.mesh.rank:
                        self.parts += [Part(Matrix(name, expert), box, -1, None, None) for box in boxes]


def _dividing(block: Placement, layout: Layout) -> Iterator[str]:
    """Yield the dimensions that divide matrices of a block: the last of as many ranks as there are parts."""
    parts = -(-prod(block.global_shape[-2:]) // max(1, prod(block.shape[-2:])))
    for dim in reversed(several(block.sharded, block.view, layout)):
        if parts > 1:
            yield dim
            parts //= layout.size(dim)
