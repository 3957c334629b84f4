"""The parallel component ``zero12``: optimizer-state and gradient sharding for any optimizer.

How gradients are reduce-scattered is in :mod:`.sharded_gradients`, how parameters lie in flat buffers that
are cut into ranges in :mod:`.flat`.
"""

from __future__ import annotations

from torch import nn

from nanotrain_core.api.torch import Mesh, Parallel, Placements
from nanotrain_zero12 import ShardConfig
from nanotrain_zero12.sharded_gradients import ShardedGradients


class Sharded(ShardedGradients, Parallel):
    """Hands the optimizer ranges to update, and gathers them, as ``GathersWeights`` of the core has it."""

    def __init__(self, config: ShardConfig) -> None:
        super().__init__()
        self.config = config

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Leave the model as it is: its placements already say whose gradients are partial."""
        return part
