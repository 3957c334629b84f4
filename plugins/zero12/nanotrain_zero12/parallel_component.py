"""The parallel component ``zero12``: optimizer-state and gradient sharding for any optimizer.

The reduce-scatter of gradients is in :mod:`.sharded_gradients`, the flat buffers of parameters and
their ranges in :mod:`.flat`.
"""

from __future__ import annotations

from nanotrain_core.api.torch import Parallel
from nanotrain_zero12 import ShardConfig
from nanotrain_zero12.sharded_gradients import ShardedGradients


class Sharded(ShardedGradients, Parallel):
    """Passes the optimizer ranges to update, and gathers them: implements the core's ``GathersWeights``.

    The model is not changed: its placements already say whose gradients are partial.
    """

    def __init__(self, config: ShardConfig) -> None:
        super().__init__()
        self.config = config
