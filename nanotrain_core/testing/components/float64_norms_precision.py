"""The implementation of ``wide_norms``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import MasterWeight
from nanotrain_core.layout.placement import Piece
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.precision.dtypes import cast, kept_dtypes
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import LiveMaster, Uniform


class WideNorms(Uniform):
    """Norms compute in float64 and return float32; all else is float32. Each weight is its own master."""

    def __init__(self) -> None:
        super().__init__(torch.float32, NoLossScale())
        self.gradient_dtype = None

    def convert(self, part: nn.Module) -> nn.Module:
        """Cast, with norms in float64."""
        cast(part, torch.float32)
        kept = kept_dtypes(part)
        for name, module, found in list(tagged(part)):
            if found.role not in (Role.NORM, Role.INNER):
                continue
            for key, parameter in module.named_parameters(recurse=False):
                if f"{name}.{key}" not in kept:
                    parameter.data = parameter.data.double()
            module.register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
            module.register_forward_hook(_narrow)
        return part

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the weight itself."""
        return LiveMaster(weight)


def _narrow(module: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
    return y.float()
