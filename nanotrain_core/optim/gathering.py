"""An optimizer behind a gradient sync that shards: weights are gathered after each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import Block, GathersWeights, GradientSync, Optimizer, Precision, StepStats
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter


class GatheringOptimizer(Optimizer):
    """Any optimizer, which updates the ranges that it is given and knows of no other ranks."""

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
        """Have masters made of this rank's ranges, and bring what they rounded to the other ranks."""
        self.mesh = mesh
        self.every = [placed.parameter for placed in parameters]
        self.behind.setup(parameters, precision, gradients, mesh)
        self._gather()
        self.weights.wait(self.every)

    @property
    def inner(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The optimizer's own."""
        return self.behind.inner

    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Update this rank's ranges, and begin to gather all others'."""
        self.wait(self.every)  # what no module asked for must not arrive on top of newer weights
        stats = self.behind.step(loss_scale=loss_scale)
        if self.mesh.device_is_async or not stats.skipped:  # all ranks alike
            self._gather()
        return stats

    def _gather(self) -> None:
        """Begin to gather weights, once an optimizer that returns early has written this rank's."""
        if self.behind.returns_early:
            self.behind.wait(self.every)
        self.weights.gather_weights()

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when ``parameters`` are there."""
        self.weights.wait(parameters)

    def blocks(self) -> Iterable[Block]:
        """Yield the optimizer's."""
        return self.behind.blocks()

    def meta(self) -> dict[str, Any]:
        """Return the optimizer's."""
        return self.behind.meta()

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Hand it to the optimizer."""
        self.behind.load_meta(meta)
