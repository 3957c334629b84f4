"""The implementation of ``ranged``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import RANGE, Piece, PlacedParameter
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.quantized_storage import PackedWeight
from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients


class RangedGradients(SummedGradients):
    """Sums each gradient, and assigns one range of the parameter to each of the ranks that hold it."""

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Split every trained parameter into ranges."""
        super().attach(parameters, mesh, dtype, passes)
        self._pieces: list[Piece] = []
        self._owners: list[tuple[PlacedParameter, int, slice]] = []
        for placed in parameters:
            if placed.parameter.requires_grad:
                self._cut(placed)

    def _cut(self, placed: PlacedParameter) -> None:
        span = placed.placement.sync_span(self.mesh.layout)
        if self.mesh.group_of(span) is None:
            self._pieces.append(Piece(placed.parameter, placed.placement))
            return
        owners, elements = self.mesh.layout.members(self.mesh.rank, span), placed.parameter.numel()
        rows = -(-elements // RANGE)
        for number, owner in enumerate(owners):
            first, end = (min(RANGE * (rows * n // len(owners)), elements) for n in (number, number + 1))
            if first < end:
                self._owners.append((placed, owner, slice(first, end)))
                if owner == self.mesh.rank:
                    where = placed.placement.sharded_over_summed()
                    self._pieces.append(Piece(placed.parameter, where, (first, end)))

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's ranges, and whole parameters that no other rank sums."""
        return self._pieces

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return the sum in a range, flat."""
        gradient = self.gradient(piece.parameter)
        return gradient if piece.span is None else gradient.reshape(-1)[slice(*piece.span)]

    def gather_weights(self) -> None:
        """Broadcast each range from the rank that updated it: those that several stages hold last."""
        for placed, owner, part in sorted(self._owners, key=lambda each: each[0].placement.stages):
            group = self.mesh.group_of(placed.placement.sync_span(self.mesh.layout))
            with self.mesh.waits.collectives:
                dist.broadcast(_stored(placed.parameter.detach(), part), src=owner, group=group)

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Do nothing: nothing is in flight when ``gather_weights`` has returned."""


def _stored(weight: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the memory of a range of a weight: of a packed one its rows."""
    if isinstance(weight, PackedWeight):
        return weight.part(part.start, part.stop).rows
    return weight.view(-1)[part]
