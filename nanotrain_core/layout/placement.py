"""The position of a rank's block in the global tensor, and how its gradient is reduced.

All code that treats parameters differently because of the layout (gradient sync, norm,
clipping, ZeRO, checkpoints, the planner, the replica check) reads placements and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.checkpoint.tensor_boxes import Box, Shape, box_slices, boxes_at
from nanotrain_core.layout.layout import Layout, Span
from nanotrain_core.layout.ranges import RANGE as RANGE  # noqa: PLC0414 others take it from here
from nanotrain_core.layout.ranges import shard_range as shard_range  # noqa: PLC0414
from nanotrain_core.layout.roles import Role, tagged

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor


@attrs.define(frozen=True)
class Placement:
    """One rank's block of one global tensor.

    Each dimension of ``view`` except the pipeline's is in exactly one of the three sets.
    """

    name: str
    """The global name, the same on every layout, for example ``layers.7.attn.q.weight``."""
    global_shape: Shape
    """Shape of the whole tensor."""
    shape: Shape
    """Shape of this rank's block."""
    offset: Shape
    """Where the block begins in the global tensor."""
    view: str = "dense"
    """The view of the layout that the dimensions below are of."""
    sharded: frozenset[str] = frozenset()
    """Mesh dimensions along which blocks differ."""
    summed: frozenset[str] = frozenset()
    """Mesh dimensions whose replicas hold partial gradients, which are summed."""
    same: frozenset[str] = frozenset()
    """Mesh dimensions whose replicas already have the same gradient."""
    stages: tuple[int, ...] = ()
    """Pipeline ranks that hold this block, if several do (a tied embedding): gradients are partial."""
    role: Role | None = None
    """Role of the innermost tagged module that has it, except layers: an optimizer may treat embeddings
    apart."""

    @classmethod
    def whole(cls, name: str, shape: Iterable[int], layout: Layout, view: str = "dense") -> Placement:
        """Place an unsharded tensor: gradients are partial along the data dimensions, equal elsewhere."""
        full = tuple(shape)
        dims = frozenset(layout.views[view].dims) - {"pp"}
        summed = dims & frozenset(layout.data_dims)
        return cls(name, full, full, (0,) * len(full), view, summed=summed, same=dims - summed)

    def split(self, axis: int, dim: str, index: int, count: int, *, uneven: bool = False) -> Placement:
        """Return the ``index``-th of ``count`` equal blocks along tensor axis ``axis``.

        ``uneven``: block lengths may differ by one, see :func:`shard_range`.

        Raises:
            ValueError: the axis is not divisible, ``dim`` already shards this tensor, or is not of its view.
        """
        found = self.cut(axis, dim, *shard_range(self.shape[axis], index, count))
        if self.shape[axis] % count and not uneven:
            raise ValueError(f"{self.name}: axis {axis} of {self.shape} does not divide by {dim} = {count}")
        return found

    def cut(self, axis: int, dim: str, begin: int, end: int) -> Placement:
        """Return rows ``begin`` to ``end``, exclusive, of this block along ``axis``; others hold the rest.

        Raises:
            ValueError: ``dim`` already shards this tensor, or is not of its view.
        """
        if dim in self.sharded:
            raise ValueError(f"{self.name} is already split along {dim!r}")
        self._replicated(dim)
        shape, offset = list(self.shape), list(self.offset)
        shape[axis], offset[axis] = end - begin, offset[axis] + begin
        return attrs.evolve(
            self,
            shape=tuple(shape),
            offset=tuple(offset),
            sharded=self.sharded | {dim},
            summed=self.summed - {dim},
            same=self.same - {dim},
        )

    def sum_over(self, *dims: str) -> Placement:
        """Return this placement with ``dims`` moved from *same* to *summed*.

        Raises:
            ValueError: the tensor is sharded along one of them, or it is not of its view.
        """
        moved = self._replicated(*dims)
        return attrs.evolve(self, summed=self.summed | moved, same=self.same - moved)

    def complete_over(self, *dims: str) -> Placement:
        """Return this placement with ``dims`` moved from *summed* to *same*: a wrapper sums gradients there.

        Raises:
            ValueError: as :meth:`sum_over`.
        """
        moved = self._replicated(*dims)
        return attrs.evolve(self, summed=self.summed - moved, same=self.same | moved)

    def divide(self, dim: str, into: tuple[str, ...], layout: Layout) -> Placement:
        """Return this placement in the view that has the dimensions ``into`` in place of ``dim``.

        Each is *sharded*, *summed* or *same* as ``dim`` was.

        Raises:
            ValueError: the layout has no such view.
        """

        def divided(dims: Iterable[str]) -> tuple[str, ...]:
            return tuple(each for old in dims for each in (into if old == dim else (old,)))

        wanted = divided(layout.views[self.view].dims)
        found = next((name for name, view in layout.views.items() if view.dims == wanted), None)
        if found is None:
            raise ValueError(f"{self.name}: the layout has no view along {', '.join(wanted)}")
        sharded, summed, same = (frozenset(divided(each)) for each in (self.sharded, self.summed, self.same))
        return attrs.evolve(self, view=found, sharded=sharded, summed=summed, same=same)

    def sharded_over_summed(self) -> Placement:
        """Return the placement of a range of this block, sharded over its ranks with partial gradients."""
        return attrs.evolve(self, sharded=self.sharded | self.summed, summed=frozenset(), stages=())

    def _replicated(self, *dims: str) -> frozenset[str]:
        """Return ``dims``, along each of which the tensor must be replicated."""
        known = self.summed | self.same
        for dim in dims:
            if dim not in known:
                raise ValueError(
                    f"{self.name} is not replicated along {dim!r}, only along {', '.join(sorted(known))}"
                )
        return frozenset(dims)

    def sync_span(self, layout: Layout) -> Span:
        """Return the ranks to sum a gradient over; falsy if it is already complete."""
        return self._span(self.summed, layout)

    def replica_span(self, layout: Layout) -> Span:
        """Return the ranks that hold this same block; falsy if it is the only copy."""
        return self._span(self.summed | self.same, layout)

    def _span(self, wanted: frozenset[str], layout: Layout) -> Span:
        dims = layout.views[self.view].dims
        return Span(tuple(d for d in dims if d in wanted and layout.size(d) > 1), self.stages)

    def replicas(self, layout: Layout) -> int:
        """Return how many ranks hold this same block."""
        return layout.size(*sorted(self.summed | self.same)) * max(1, len(self.stages))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index into the global tensor."""
        return box_slices(self.offset, self.shape)


#: The placements of every parameter and buffer on this rank, by global name. Wrappers replace entries.
Placements = dict[str, Placement]


@attrs.define(frozen=True, eq=False)
class PlacedParameter:
    """A live parameter with its placement."""

    parameter: nn.Parameter
    """This rank's block, or the memory of a DTensor's local tensor."""
    placement: Placement
    """Where the block is in the whole model."""
    parts: tuple[int, ...] = (0,)
    """This rank's model parts that hold it: several, if virtual stages are tied."""
    dtensor: DTensor | None = None
    """The DTensor that the model has instead of ``parameter``, if a wrapper created one: ``parameter`` is
    then the memory of its local tensor. Autograd accumulates gradients here."""


@attrs.define(frozen=True, eq=False)
class Piece:
    """The unit for which one rank reduces the gradient and updates: a parameter, or a range of its block."""

    parameter: nn.Parameter
    """This rank's whole block."""
    placement: Placement
    """Placement of the block, after :meth:`Placement.sharded_over_summed` if its holders each update a
    range."""
    span: tuple[int, int] | None = None
    """First and one past the last element, of the block flattened in row-major order; None: all, in its
    shape. Each is a multiple of :data:`RANGE`, or the block's end."""

    @property
    def weight(self) -> torch.Tensor:
        """The live weight: the parameter's own storage, in its shape or as a flat range."""
        from nanotrain_core.precision.quantized_storage import range_of

        whole = self.parameter.detach()
        return whole if self.span is None else range_of(whole, *self.span)

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the global tensor that make it up, offset and shape, in the order of its elements."""
        where = self.placement
        if self.span is None:
            return [(where.offset, where.shape)]
        return boxes_at(where.offset, where.shape, *self.span)

    @property
    def name(self) -> str:
        """The parameter's name, with the range if there is one: ``layers.0.attn.q.weight[0:512]``."""
        name = self.placement.name
        return name if self.span is None else f"{name}[{self.span[0]}:{self.span[1]}]"


def place(parts: Iterable[nn.Module], layout: Layout) -> Placements:
    """Place every parameter and buffer of newly built, unsharded model parts."""
    return {
        name: Placement.whole(name, tensor.shape, layout)
        for part in parts
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }


def note_roles(parts: Iterable[nn.Module], placements: Placements) -> None:
    """Record in placements the roles of parameters in finished parts."""
    for part in parts:
        for module_name, module, tag in tagged(part):  # outermost first
            for key, _ in module.named_parameters() if tag.role is not Role.BLOCK else ():
                name = f"{module_name}.{key}"
                placements[name] = attrs.evolve(placements[name], role=tag.role)


def placed_parameters(
    parts: Iterable[nn.Module], placements: Mapping[str, Placement]
) -> list[PlacedParameter]:
    """Pair the parameters of ``parts`` with their placements, in model order.

    Raises:
        ValueError: a parameter has no placement, or its shape is not the placed block's: a wrapper
            changed one without the other.
    """
    from nanotrain_core.layout.dtensors import local_parameter

    found: dict[str, PlacedParameter] = {}
    for number, part in enumerate(parts):
        for name, buffer in part.named_buffers():
            if (where := placements.get(name)) and tuple(buffer.shape) != where.shape:
                raise ValueError(
                    f"buffer {name} has shape {tuple(buffer.shape)} but is placed as {where.shape}"
                )
        for name, parameter in part.named_parameters():
            if name in found:  # tied: two parts on this rank hold one parameter
                found[name] = attrs.evolve(found[name], parts=(*found[name].parts, number))
                continue
            placement = placements.get(name)
            if placement is None:
                raise ValueError(f"parameter {name} has no placement: the wrapper that made it must add one")
            own, dtensor = local_parameter(parameter)
            if tuple(own.shape) != placement.shape:
                what = "has" if dtensor is None else "is a DTensor, whose local tensor has"
                raise ValueError(
                    f"parameter {name} {what} shape {tuple(own.shape)} but is placed as {placement.shape}"
                )
            found[name] = PlacedParameter(own, placement, (number,), dtensor)
    return list(found.values())
