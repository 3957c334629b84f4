"""The built-in kernels: ``torch``, and ``auto``, which takes what a plugin provides for the run's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanotrain_core.builtin.configs import AutoKernelsConfig, TorchKernelsConfig
from nanotrain_core.compile.eager import kernels_of
from nanotrain_core.contracts import Kernels
from nanotrain_core.models.ops import Ops, plain_ops
from nanotrain_core.recipe.tree import Selection

if TYPE_CHECKING:
    from nanotrain_core.registry.registry import Registry


class TorchKernels(Kernels):
    """Plain PyTorch: the base class, as it is."""

    def __init__(self, config: TorchKernelsConfig) -> None:
        self.config = config

    def ops(self, device: torch.device) -> Ops:
        """Return plain PyTorch; on a GPU the products of the loss have a multiple of 128 columns."""
        return plain_ops(device)


class AutoKernels(Kernels):
    """Stands for the kernels of the device, until :func:`kernels_for` knows which device that is."""

    def __init__(self, config: AutoKernelsConfig) -> None:
        self.config = config


def kernels_for(selection: Selection, registry: Registry, device: torch.device) -> tuple[str, Kernels]:
    """Return the name and the object of a recipe's kernels; of ``auto``, those for ``device``.

    Those are of the one installed component that provides ``kernels:<device type>``, with its default
    config; where there is none, or several, ``torch``.
    """
    use = kernels_of(selection, registry, device.type)
    if use != selection.use:
        selection = Selection("kernels", use, registry.get("kernels", use).config())
    return use, registry.build(selection)


def installed_kernels(device: torch.device) -> Kernels:
    """Return what ``auto`` takes for ``device``, where there is no recipe."""
    from nanotrain_core.registry.registry import load_plugins

    return kernels_for(Selection("kernels", "auto", AutoKernelsConfig()), load_plugins(), device)[1]
