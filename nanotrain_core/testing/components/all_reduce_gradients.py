"""The implementation of ``summed``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.contracts import Parallel
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.pipeline.passes import Passes


class SummedGradients(LocalGradients, Parallel):
    """All-reduces each partial gradient over its ranks, one after the other, after backward."""

    reduces = True

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Store the mesh."""
        self.mesh = mesh
        super().attach(parameters, mesh, dtype, passes)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def to_sum(self) -> Sequence[PlacedParameter]:
        """Return the parameters whose gradients may be partial: all of them."""
        return self.placed

    def finish(self) -> None:
        """All-reduce all gradients, those that several stages hold last."""
        super().finish()
        spans = [(placed, placed.placement.sync_span(self.mesh.layout)) for placed in self.to_sum()]
        for placed, span in sorted(spans, key=lambda each: each[1].stages):
            group = self.mesh.group_of(span)
            if group is not None and placed.parameter.requires_grad:
                total = self._sums[placed.parameter] = super().gradient(placed.parameter)
                with self.mesh.waits.collectives:
                    dist.all_reduce(total, group=group)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the sum."""
        return self._sums[parameter] if parameter in self._sums else super().gradient(parameter)

    def zero(self) -> None:
        """Clear all gradients."""
        super().zero()
        self._sums.clear()
