"""The built-in kernels: ``torch``, and ``auto``, which selects a plugin's kernels for the run's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanotrain_core.builtin.configs import AutoKernelsConfig, TorchKernelsConfig
from nanotrain_core.compile.eager import on_device
from nanotrain_core.contracts import Kernels
from nanotrain_core.recipe.tree import Selection

if TYPE_CHECKING:
    from nanotrain_core.registry.registry import Registry


class TorchKernels(Kernels):
    """Plain PyTorch, as in the base class."""

    def __init__(self, config: TorchKernelsConfig) -> None:
        self.config = config


class AutoKernels(Kernels):
    """Placeholder for the device's kernels, until :func:`kernels_for` knows the device."""

    def __init__(self, config: AutoKernelsConfig) -> None:
        self.config = config


def kernels_for(selection: Selection, registry: Registry, device: torch.device) -> tuple[str, Kernels]:
    """Return the name and the object of a recipe's kernels; for ``auto``, those for ``device``."""
    selection = on_device(selection, registry, device.type)
    return selection.use, registry.build(selection)


def installed_kernels(device: torch.device) -> Kernels:
    """Return the kernels that ``auto`` selects for ``device``, where there is no recipe."""
    from nanotrain_core.registry.registry import load_plugins

    return kernels_for(Selection("kernels", "auto", AutoKernelsConfig()), load_plugins(), device)[1]
