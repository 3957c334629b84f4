"""Gathers whole tensors from the ranks' pieces, for an optimizer whose update needs whole matrices.

Ranks may hold blocks of a matrix (tensor parallelism) and ranges of these (optimizer-state sharding), as
given by placements; this code names no dimension except the pipeline's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.checkpoint.tensor_boxes import Box, Shape, box_slices
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece

#: The boxes of each parameter that each rank has.
Boxes = Mapping[int, Mapping[str, Sequence[Box]]]
#: Maximum elements of tensors that one all-gather assembles: 128 MiB in float32; a single one may be larger.
BUCKET = 32 * 2**20


class WholeTensors:
    """All-gathers tensors shaped as the weights of ``pieces`` within each pipeline stage. Collective.

    A tied parameter whose ranges are divided among the ranks of several stages is gathered among these.
    """

    own: defaultdict[str, list[Piece]]
    """This rank's pieces of each parameter of which it has any, by its name."""
    shapes: dict[str, Shape]
    """The whole shape of each parameter with pieces on any rank, in this rank's pipeline stage."""

    def __init__(self, pieces: Sequence[Piece], mesh: Mesh) -> None:
        """Exchange which rank has which piece: every rank of the world calls it, with its own pieces.

        Raises:
            NanotrainError: no rank has some elements of a parameter.
        """
        self.mesh, self.own, self.dry = mesh, defaultdict(list), mesh.device.type == "meta"
        for piece in pieces:
            self.own[piece.placement.name].append(piece)
        dims = mesh.layout.views["dense"].dims
        self.dims = tuple(dim for dim in dims if dim != "pp" and mesh.size(dim) > 1)
        mesh.agree_on_groups([Span(self.dims)] if self.dims else [])
        mine = {name: [box for piece in found for box in piece.boxes] for name, found in self.own.items()}
        everyone: Boxes = dict(zip(mesh.ranks(*self.dims), self._of_stage(mine), strict=True))
        shapes = {name: found[0].placement.global_shape for name, found in self.own.items()}
        self.shapes = {name: shape for theirs in self._of_stage(shapes) for name, shape in theirs.items()}
        sharing = self._sharing(everyone)
        self.groups = [_Group(mesh, *each, self._assumed()) for each in sorted(sharing.items())]
        mesh.agree_on_groups(group.span for group in self.groups if group.span)
        self.buckets = [
            (group, names)
            for group in self.groups
            for names in _buckets({name: self.shapes[name] for name in group.names})
        ]
        self.dtype: torch.dtype | None = None

    def _of_stage(self, value: Any) -> list[Any]:
        """Return the value of every rank of this pipeline stage."""
        return self.mesh.gather(value, *self.dims) if self.dims else [value]

    def _assumed(self) -> set[int]:
        """Return the ranks that hold other parts where none can be asked: on ``meta``, in a dry run.

        Each is taken to hold as much as this rank, in the same boxes: only sizes matter.
        """
        ranks, rank = self.mesh.layout.ranks, self.mesh.rank
        own = (piece for pieces in self.own.values() for piece in pieces if self.dry)
        return {other for piece in own for other in ranks(rank, *piece.placement.sharded) if other != rank}

    def _sharing(self, everyone: Boxes) -> dict[tuple[int, ...], Boxes]:
        """Return the boxes by the stages among whose ranks they are exchanged; (): within this one."""
        incomplete = set() if self.dry else self._incomplete(everyone, self.shapes)
        own = _only(everyone, incomplete)
        stages: list[Boxes] = self.mesh.gather(own, "pp") if "pp" in self.mesh.layout.dims else [own]
        lacking = self._incomplete(
            {rank: each for ranks in stages for rank, each in ranks.items()}, incomplete
        )
        if lacking:
            raise NanotrainError(f"no rank has all of {min(lacking)}: expected pieces that make it whole")
        sharing: dict[tuple[int, ...], Boxes] = {(): _only(everyone, self.shapes.keys() - incomplete)}
        holders = {
            name: tuple(n for n, ranks in enumerate(stages) if any(name in each for each in ranks.values()))
            for name in incomplete
        }
        for several in {*holders.values()}:
            theirs = {rank: each for n in several for rank, each in stages[n].items()}
            sharing[several] = _only(theirs, {name for name in incomplete if holders[name] == several})
        return sharing

    def _incomplete(self, everyone: Boxes, names: Iterable[str]) -> set[str]:
        """Return parameters of which these ranks together have only some elements."""
        found = {name: {box for boxes in everyone.values() for box in boxes.get(name, ())} for name in names}
        elements = {name: sum(prod(shape) for _, shape in boxes) for name, boxes in found.items()}
        return {name for name, number in elements.items() if number < prod(self.shapes[name])}

    def gather(self, tensors: Mapping[Piece, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of all parameters with pieces on any rank, in one order on all ranks.

        ``tensors`` has one for each piece of this rank, in its weight's shape and in one dtype on all ranks.
        """
        if self.dtype is None:  # a rank without pieces receives in the dtype of the others
            own_dtype = next((tensor.dtype for tensor in tensors.values()), None)
            self.dtype = next((found for found in self._of_stage(own_dtype) if found), torch.float32)
        like = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        for group, names in self.buckets:
            own = [tensors[piece].reshape(-1) for name in names for piece in self.own.get(name, ())]
            received = group.exchanged(torch.cat(own) if own else like, names)
            firsts = [0] * len(received)
            for name in names:
                whole = like.new_zeros(self.shapes[name])
                for rank, shares in enumerate(received):
                    for offset, shape in group.boxes[rank].get(name, ()):
                        end = firsts[rank] + prod(shape)
                        whole[box_slices(offset, shape)] = shares[firsts[rank] : end].view(shape)
                        firsts[rank] = end
                yield name, whole

    def pieces(self, name: str, whole: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield this rank's pieces of a parameter, each with its part of ``whole``, in its weight's shape."""
        for piece in self.own.get(name, ()):
            found = []
            for offset, shape in piece.boxes:
                found.append(whole[box_slices(offset, shape)].reshape(-1))
            yield piece, torch.cat(found).view(piece.placement.shape if piece.span is None else -1)


def _only(everyone: Boxes, names: Collection[str]) -> Boxes:
    return {
        rank: {name: found for name, found in boxes.items() if name in names}
        for rank, boxes in everyone.items()
    }


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


class _Group:
    """The ranks among which some parameters are exchanged, and which of them has which boxes."""

    def __init__(self, mesh: Mesh, stages: tuple[int, ...], everyone: Boxes, assumed: set[int]) -> None:
        """Leave out dimensions along which all ranks have the same boxes: that communication is redundant.

        ``assumed`` are ranks whose boxes are taken to differ from this one's.
        """
        self.mesh, self.names = mesh, {name for boxes in everyone.values() for name in boxes}

        def differs(dim: str) -> bool:
            along = mesh.layout.ranks
            return not assumed.isdisjoint(along(mesh.rank, dim)) or any(
                everyone[r] != boxes for rank, boxes in everyone.items() for r in along(rank, dim)
            )

        dims = mesh.layout.views["dense"].dims
        self.span = Span(tuple(dim for dim in dims if dim != "pp" and differs(dim)), stages)
        self.boxes = [everyone[rank] for rank in mesh.layout.members(mesh.rank, self.span)]

    def exchanged(self, flat: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
        """Return every rank's elements of some parameters, including its own; others may be padded."""
        group = self.mesh.group_of(self.span)
        if group is None:
            return [flat]
        lengths = [
            sum(prod(shape) for name in names for _, shape in theirs.get(name, ())) for theirs in self.boxes
        ]
        sent = flat.new_zeros(max(lengths))
        sent[: len(flat)] = flat
        received = [torch.empty_like(sent) for _ in self.boxes]
        with self.mesh.waits.collectives:
            dist.all_gather(received, sent, group=group)
        return received
