"""The components of a run, built from a recipe, before any of them is used."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from nanotrain_core.contracts import (
    Checkpoint,
    Data,
    Kernels,
    Model,
    Monitor,
    Optimizer,
    Parallel,
    Precision,
    Schedule,
    Topology,
)
from nanotrain_core.models.kernels import kernels_for
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.registry import Registry


@attrs.define(frozen=True, eq=False, kw_only=True)
class Components:
    """The components that a recipe selects, built from their configs."""

    topology: Topology
    model: Model
    wrappers: Sequence[tuple[Selection, Parallel]]
    """In the order of the recipe."""
    kernels_name: str
    """Those that ``auto`` selects for the device, if the recipe has ``auto``."""
    kernels: Kernels
    precision: Precision
    optimizer: Optimizer
    schedule: Schedule
    checkpoint: Checkpoint
    data: Data
    monitors: Sequence[Monitor]

    @classmethod
    def of(cls, recipe: Recipe, registry: Registry, device: torch.device) -> Components:
        """Build the components of a recipe for a device."""
        build = registry.build
        kernels_name, kernels = kernels_for(recipe.kernels, registry, device)
        return cls(
            topology=build(recipe.topology),
            model=build(recipe.model),
            wrappers=[(each, build(each)) for each in recipe.parallel],
            kernels_name=kernels_name,
            kernels=kernels,
            precision=build(recipe.precision),
            optimizer=build(recipe.optimizer),
            schedule=build(recipe.schedule),
            checkpoint=build(recipe.checkpoint),
            data=build(recipe.data),
            monitors=[_monitor(selection, registry) for selection in recipe.monitor],
        )


def _monitor(selection: Selection, registry: Registry) -> Monitor:
    """Build a monitor and give it the metrics that its component declares."""
    monitor: Monitor = registry.build(selection)
    monitor.declared = registry.get("monitor", selection.use).metrics or monitor.declared
    return monitor
