"""AdamW on this rank's range of every bucket: the ``zero12`` component, both optimizer and gradient sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain_core.api.torch import (
    AdamW,
    GradientSync,
    MasterWeight,
    Mesh,
    Piece,
    PlacedParameter,
    Precision,
    StepStats,
)
from nanotrain_zero12 import Zero12Config
from nanotrain_zero12.offload import HostMaster
from nanotrain_zero12.sharded_gradients import ShardedGradients


class Zero12(ShardedGradients, AdamW):
    """An :class:`~nanotrain_core.contracts.Optimizer` that is its own gradient sync."""

    config: Zero12Config
    returns_early = True

    def __init__(self, config: Zero12Config) -> None:
        ShardedGradients.__init__(self)
        AdamW.__init__(self, config)

    def master(self, piece: Piece, precision: Precision) -> MasterWeight:
        """Return the precision's master of a range, on the host if state is offloaded."""
        if self.config.offload and piece.weight.device.type != "cpu":
            return HostMaster.of(piece, precision)
        return super().master(piece, precision)

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Create masters of this rank's ranges, and all-gather the values they rounded."""
        super().setup(parameters, precision, gradients, mesh)
        self.gather_weights()
        self.wait(list(self.queue_of))

    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Update this rank's ranges and begin to all-gather all others.

        A skipped step gathers nothing or, where the host would have to wait for the flag, unchanged values.
        """
        self.wait(list(self.queue_of))  # what no module waited for must not overwrite newer weights
        stats = super().step(loss_scale=loss_scale)
        if self.mesh.device_is_async or not stats.skipped:  # on all ranks alike, also one that read the norm
            self.gather_weights()
        return stats

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore the state that a checkpoint was read into."""
        super().load_meta(meta)
        for shard in self.master_shards:
            if isinstance(shard.master, HostMaster):
                shard.master.refresh()
