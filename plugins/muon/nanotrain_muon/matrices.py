"""Which ranks hold which parts of which matrices: read from their pieces.

Ranks may hold blocks of a matrix (tensor parallelism, ``fsdp2``) and ranges of these (``zero12``). Stacked
experts are matrices of their own, of which a rank of expert parallelism has some whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

import attrs
import torch

from nanotrain_core.api import Layout, NanotrainError, Shape, Span
from nanotrain_core.api.torch import Mesh, Piece, Placement
from nanotrain_muon.assumed import OtherRanks

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
    """Index of its piece's gradient."""
    start: int | None
    """Its first element, of a flat range."""
    index: int | None
    """Its place in this rank's stack, of a whole block of one."""

    @property
    def elements(self) -> int:
        """Their number."""
        return self.box[2] * self.box[3]

    def of(self, gradients: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the part [rows, columns], a view of its gradient."""
        rows, columns = self.box[2:]
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
        stacked, start = len(piece.placement.global_shape) == 3, 0
        for offset, shape in piece.boxes:
            boxes = matrices_at(offset, shape)
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


#: What one rank holds: boxes of matrices, and the placements of their parameters, by name.
Holding = tuple[Mapping[Matrix, Sequence[Box]], Mapping[str, Placement]]


def holding_of(pieces: Iterable[Piece], view: str) -> Holding:
    """Return what a rank with these pieces holds in a view."""
    chosen = [piece for piece in pieces if piece.placement.view == view]
    return boxes_of(parts_of(chosen)), {piece.placement.name: piece.placement for piece in chosen}


def several(dims: Collection[str], view: str, layout: Layout) -> tuple[str, ...]:
    """Return those of ``dims`` that have several ranks, in the order of their view."""
    return tuple(dim for dim in layout.views[view].dims if dim in dims and layout.size(dim) > 1)


class Survey:
    """Finds the ranks among which matrices are exchanged, and what each of them holds."""

    def __init__(
        self, pieces: Sequence[Piece], mesh: Mesh, *, share: bool, others: OtherRanks | None = None
    ) -> None:
        """Ask all ranks. Collective over the world.

        Args:
            pieces: of this rank's matrices.
            mesh: of the run.
            share: whether ranks that hold the same parts exchange matrices, too.
            others: what is assumed of other ranks if they cannot be asked.

        Raises:
            NanotrainError: the ranks of a stage do not have all of a matrix.
        """
        self.mesh, self.layout, self.share, self.others = mesh, mesh.layout, share, others
        self.parts = parts_of(pieces)
        self.shapes: dict[str, Shape] = {}
        """Of whole parameters."""
        self.held: dict[Span, dict[int, dict[Matrix, list[Box]]]] = defaultdict(lambda: defaultdict(dict))
        """By span, what each of its ranks holds, also of matrices that this rank has nothing of."""
        self._ask(pieces)
        mesh.agree_on_groups(span for span in self.held if span)

    def _ask(self, pieces: Sequence[Piece]) -> None:
        along: dict[str, set[str]] = defaultdict(set)
        placed = (each.placement for each in pieces) if self.others is None else self.others.placements()
        own = {(each.view, self._asked_along(each)) for each in placed}
        for theirs in self.mesh.gather(own):
            for view, dims in theirs:
                along[view] |= dims
        spans = {view: Span(several(along[view], view, self.layout)) for view in sorted(along)}
        self.mesh.create_groups([span for span in spans.values() if span])
        for view, span in spans.items():
            ranks = self.layout.members(self.mesh.rank, span)
            told = self._told(holding_of(pieces, view), view, span)
            placements = {name: each for _, theirs in told for name, each in theirs.items()}
            self.shapes |= {name: each.global_shape for name, each in placements.items()}
            self._divide({r: theirs for r, (theirs, _) in zip(ranks, told, strict=True)}, placements, span)

    def _told(self, mine: Holding, view: str, span: Span) -> list[Holding]:
        """Return what each rank of the span holds in a view."""
        if not span:
            return [mine]
        if self.others is None:
            return self.mesh.gather(mine, *span.dims)
        ranks, me = self.layout.members(self.mesh.rank, span), self.mesh.rank
        return [mine if rank == me else holding_of(self.others.pieces_of(rank), view) for rank in ranks]

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
            ranks = {*self.layout.members(self.mesh.rank, span)}
            for matrix, held in holders.items():
                for rank, some in held.items():
                    if some and rank in ranks:
                        self.held[span][rank][matrix] = list(some)

    def _span(self, holders: Mapping[Matrix, Mapping[int, Sequence[Box]]], asked: Span) -> Span:
        """Return the ranks along the dimensions along which parts of a matrix differ."""
        parts = [
            (held, rank, boxes)
            for matrix, held in holders.items()
            for rank, boxes in held.items()
            if self._lacks(matrix, boxes)
        ]
        found = {
            dim
            for dim in asked.dims
            if any(
                held.get(other, boxes) != boxes
                for held, rank, boxes in parts
                for other in self.layout.ranks(rank, dim)
            )
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
            if not lacking or (self.others is not None and dims == asked.dims):
                return Span(dims)
        raise NanotrainError(
            f"muon: the ranks of a pipeline stage do not have all of {min(lacking).name}, as its optimizer "
            "state is sharded among several stages; expected a layer of one stage, or no sharding (ddp)"
        )

    def _lacks(self, matrix: Matrix, boxes: Collection[Box]) -> bool:
        """Return whether different boxes are less than a whole matrix."""
        return sum(rows * columns for _, _, rows, columns in boxes) < prod(self.shapes[matrix.name][-2:])
