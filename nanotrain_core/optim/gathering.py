"""An optimizer behind a gradient sync that shards: weights are all-gathered after each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import Block, GathersWeights, GradientSync, Optimizer, Precision, StepStats
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter


class GatheringOptimizer(Optimizer):
    """Wraps any optimizer, which updates the ranges that it is given and is unaware of other ranks."""

    returns_early = True

    def __init__(self, behind: Optimizer, weights: GathersWeights) -> None:
        self.behind, self.weights = behind, weights

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Create masters of this rank's ranges, and all-gather the values they rounded."""
        self.mesh = mesh
        self.every = [placed.parameter for placed in parameters]
        self.behind.setup(parameters, precision, gradients, mesh)
        self._gather()
        self.weights.wait(self.every)

    @property
    def inner(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.behind.inner

    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Update this rank's ranges, and begin to all-gather all others."""
        self.wait(self.every)  # an old all-gather that no module waited for must not overwrite newer weights
        stats = self.behind.step(loss_scale=loss_scale)
        if self.mesh.device_is_async or not stats.skipped:  # the same on all ranks
            self._gather()
        return stats

    def _gather(self) -> None:
        """Begin to all-gather weights, after an optimizer that returns early has written this rank's."""
        if self.behind.returns_early:
            self.behind.wait(self.every)
        self.weights.gather_weights()

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when ``parameters`` have arrived."""
        self.weights.wait(parameters)

    def blocks(self) -> Iterable[Block]:
        """Yield the wrapped optimizer's blocks."""
        return self.behind.blocks()

    def blocks_of(self, parameters: Collection[str]) -> Iterable[Block]:
        """Yield the wrapped optimizer's blocks of some parameters."""
        return self.behind.blocks_of(parameters)

    def meta(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.behind.meta()

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Pass the state to the wrapped optimizer."""
        self.behind.load_meta(meta)
