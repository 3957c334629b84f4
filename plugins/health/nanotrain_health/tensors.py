"""Gradients, weights, updates and optimizer state, by layer; at level ``debug`` also by parameter.

If several ranks hold the same block, one of them measures it: data-parallel ranks divide the pass over all
weights among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nanotrain_core.api.torch import Placement, UpdateReport
from nanotrain_health.watcher import Scene, Watcher

Placed = Iterable[tuple[torch.Tensor, Placement]]

#: Optimizer state: moments of Adam and of SGD.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Tensors(Watcher):
    """Publishes norms, from which :mod:`~nanotrain_health.ratios` derives further metrics.

    Updates are measured on master weights where the optimizer has them: the change of a bfloat16 weight is
    mostly rounding error.
    """

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.before: list[torch.Tensor] = []
        """Copies of the master weights of monitored layers, from before the update."""
        self.has_masters = True
        """Whether this rank may have any: until an update has shown that there are none."""

    def before_update(self, update: UpdateReport) -> None:
        """Measure gradients and weights, and copy those whose change is measured."""
        if not self.scene.looks(update):
            return
        self._publish("gradients", update.placed_gradients())
        self._publish("weights", self.scene.run.weights())
        masters = self._masters() if self.has_masters else []
        self.before, mastered = [x.clone() for x, _ in masters], {p.name for _, p in masters}
        update.keep_weights(lambda placement: placement.name not in mastered and self._measured(placement))

    def after_update(self, update: UpdateReport) -> None:
        """Measure what the optimizer changed, and its state."""
        if not self.scene.looks(update):
            return
        scene, changes = self.scene, self._changes(update)
        scene.metrics.placed("updates/norm/{parameter}", changes, group=scene.block)
        if scene.detailed:
            scene.metrics.placed("updates/parameters/norm/{parameter}", changes)
        moments = [x for x, _ in scene.run.optimizer_state(*MOMENTS, wanted=self._measured)]
        if moments:
            # As fast as norms, and finite for values whose squares are not; maxima take longer.
            sums = torch.stack([x.sum() for x in moments])
            scene.metrics.scalar("optimizer/nonfinite", sums.isfinite().logical_not_().sum())

    def _masters(self) -> list[tuple[torch.Tensor, Placement]]:
        """Return the master weights that this rank measures: of 32 bits or more, on the device of the run."""
        run = self.scene.run
        return [
            (x, p)
            for x, p in run.optimizer_state("master", wanted=self._measured)
            if x.itemsize >= 4 and x.device == run.device
        ]

    def _changes(self, update: UpdateReport) -> list[tuple[torch.Tensor, Placement]]:
        """Return the changes of master weights, and of monitored weights that have no master."""
        masters = self._masters() if self.has_masters else []
        self.has_masters = bool(masters)
        found = [(torch.sub(x, old, out=old), p) for (x, p), old in zip(masters, self.before, strict=True)]
        self.before, mastered = [], {p.name for _, p in masters}
        weights = ((x, p) for x, p in update.changes() if p.name not in mastered and self._measured(p))
        return [*found, *weights]

    def _measured(self, placement: Placement) -> bool:
        """Return whether this rank measures a parameter that is looked at closely."""
        return self._close(placement) and self.scene.metrics.measures(placement)

    def _close(self, placement: Placement) -> bool:
        """Return whether a parameter is in a layer that is looked at closely; of a plain model all are."""
        scene = self.scene
        return scene.detailed or not scene.sentinels or scene.block(placement.name) in scene.sentinels

    def _publish(self, what: str, tensors: Placed) -> None:
        scene = self.scene
        if not scene.detailed:
            scene.metrics.placed(f"{what}/norm/{{parameter}}", tensors, group=scene.block)
            return
        found = [(x, p) for x, p in tensors if scene.metrics.measures(p)]
        scene.metrics.placed(f"{what}/norm/{{parameter}}", found, group=scene.block)
        name = f"{what}/parameters/{{statistic}}/{{parameter}}"
        scene.metrics.placed(name, found, ("norm", "mean", "std"))
        for x, placement in found:
            scene.metrics.histogram(f"{what}/histogram/{scene.block(placement.name)}", x)
