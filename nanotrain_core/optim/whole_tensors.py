"""Gathers whole tensors from the ranks' pieces, for an optimizer whose update needs whole matrices.

Ranks may hold blocks of a matrix (tensor parallelism) and ranges of these (optimizer-state sharding), as
given by placements; this code names no dimension except the pipeline's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.checkpoint.tensor_boxes import Box, Shape, boxes_at, index_of
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, Placement

#: Maximum elements of tensors that one all-gather assembles: 128 MiB in float32; a single one may be larger.
BUCKET = 32 * 2**20


def boxes_of(piece: Piece) -> list[Box]:
    """Return the boxes of the global tensor that make up a piece, in the order of its elements."""
    where: Placement = piece.placement
    if piece.span is None:
        return [(where.offset, where.shape)]
    return boxes_at(where.offset, where.shape, *piece.span)


class WholeTensors:
    """All-gathers tensors shaped as the weights of ``pieces`` within each pipeline stage. Collective."""

    def __init__(self, pieces: Sequence[Piece], mesh: Mesh) -> None:
        """Exchange which rank has which piece: every rank of the world calls it, with its own pieces."""
        self.mesh, self.own = mesh, defaultdict[str, list[Piece]](list)
        for piece in pieces:
            self.own[piece.placement.name].append(piece)
        dims = tuple(dim for dim in mesh.layout.views["dense"].dims if dim != "pp" and mesh.size(dim) > 1)
        self._exchange_along(dims)
        mine = {name: [box for piece in found for box in boxes_of(piece)] for name, found in self.own.items()}
        self.boxes: Sequence[Mapping[str, list[Box]]] = self._of_all(mine)
        shapes = {name: found[0].placement.global_shape for name, found in self.own.items()}
        self.shapes: dict[str, Shape] = {}
        for theirs in self._of_all(shapes):
            self.shapes.update(theirs)
        self._leave_out_replicas()
        self.buckets = [*_buckets(self.shapes)]
        self.dtype: torch.dtype | None = None

    def _exchange_along(self, dims: tuple[str, ...]) -> None:
        self.dims, span = dims, Span(dims)
        self.mesh.agree_on_groups([span] if dims else [])
        self.group = self.mesh.group_of(span) if dims else None

    def _leave_out_replicas(self) -> None:
        """Restrict communication to dimensions whose ranks have different boxes: the rest is redundant."""
        everyone = dict(zip(self.mesh.ranks(*self.dims), self.boxes, strict=True))

        def differs(dim: str) -> bool:
            along = self.mesh.layout.ranks
            return any(everyone[r] != boxes for rank, boxes in everyone.items() for r in along(rank, dim))

        self._exchange_along(tuple(filter(differs, self.dims)))
        self.boxes = [everyone[rank] for rank in self.mesh.ranks(*self.dims)]

    def _of_all(self, value: Any) -> list[Any]:
        """Return the value of every rank of this pipeline stage."""
        return self.mesh.gather(value, *self.dims) if self.dims else [value]

    def gather(self, tensors: Mapping[Piece, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of all parameters with pieces on any rank, in one order on all ranks.

        ``tensors`` has one for each piece of this rank, in its weight's shape and in one dtype on all ranks.
        """
        if self.dtype is None:  # a rank without pieces receives in the dtype of the others
            own_dtype = next((tensor.dtype for tensor in tensors.values()), None)
            self.dtype = next((found for found in self._of_all(own_dtype) if found), torch.float32)
        like = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        for names in self.buckets:
            own = [tensors[piece].reshape(-1) for name in names for piece in self.own.get(name, ())]
            received = self._exchanged(torch.cat(own) if own else like, names)
            firsts = [0] * len(received)
            for name in names:
                whole = like.new_zeros(self.shapes[name])
                for rank, shares in enumerate(received):
                    for offset, shape in self.boxes[rank].get(name, ()):
                        end = firsts[rank] + prod(shape)
                        whole[index_of(offset, shape)] = shares[firsts[rank] : end].view(shape)
                        firsts[rank] = end
                yield name, whole

    def _exchanged(self, flat: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
        """Return every rank's elements of some parameters, including its own; others may be padded."""
        if self.group is None:
            return [flat]
        lengths = [
            sum(prod(shape) for name in names for _, shape in theirs.get(name, ())) for theirs in self.boxes
        ]
        sent = flat.new_zeros(max(lengths))
        sent[: len(flat)] = flat
        received = [torch.empty_like(sent) for _ in self.boxes]
        with self.mesh.waits.collectives:
            dist.all_gather(received, sent, group=self.group)
        return received

    def pieces(self, name: str, whole: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield this rank's pieces of a parameter, each with its part of ``whole``, in its weight's shape."""
        for piece in self.own.get(name, ()):
            found = []
            for offset, shape in boxes_of(piece):
                found.append(whole[index_of(offset, shape)].reshape(-1))
            yield piece, torch.cat(found).view(piece.placement.shape if piece.span is None else -1)


def _buckets(shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    """Yield names in order, in buckets of at most ``BUCKET`` elements or of one larger tensor."""
    names: list[str] = []
    elements = 0
    for name in sorted(shapes):
        elements += prod(shapes[name])
        if names and elements > BUCKET:
            yield names
            names, elements = [], prod(shapes[name])
        names.append(name)
    if names:
        yield names
