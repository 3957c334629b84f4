"""fp64, fp32, bf16 and fp16: the dtypes of weights, activations, gradients and masters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nanotrain_core.builtin.configs import FP16Config, PrecisionConfig
from nanotrain_core.contracts import LossScale, MasterWeight, Precision
from nanotrain_core.layout.placement import Piece
from nanotrain_core.precision.dtypes import cast
from nanotrain_core.precision.loss_scale import DynamicLossScale, NoLossScale


class LiveMaster(MasterWeight):
    """The parameter is its own master: no second copy."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        """The model's parameter, or a range of it, in the parameter's dtype."""

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The parameter's own storage is updated; nothing is copied."""
        return self.weight, self.weight

    def load(self) -> torch.Tensor:
        """Return the parameter's own storage."""
        return self.weight

    def store(self, value: torch.Tensor) -> None:
        """Write ``value`` unless the optimizer already updated the storage in place."""
        if value.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(value)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return no state beyond the parameter."""
        return {}


class Float32Master(MasterWeight):
    """A float32 copy, rounded into the model's parameter at every store."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        """What the model computes with, in the parameter's dtype: the master is rounded into it."""
        self.master = weight.detach().float()

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The copy is updated, and rounded into the parameter."""
        return self.master, self.weight

    def load(self) -> torch.Tensor:
        """Return the float32 copy."""
        return self.master

    def store(self, value: torch.Tensor) -> None:
        """Store ``value`` and round it into the parameter."""
        if value.data_ptr() != self.master.data_ptr():
            self.master.copy_(value)
        self.weight.copy_(value)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the copy."""
        return {"master": self.master}


class Uniform(Precision):
    """One dtype for every parameter and activation; masters and gradients at least float32."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale) -> None:
        self.parameter_dtype = dtype
        self.gradient_dtype = torch.promote_types(dtype, torch.float32)
        self.loss_scale = loss_scale

    def convert(self, part: nn.Module) -> nn.Module:
        """Cast every parameter except those that a module keeps in their own dtype."""
        return cast(part, self.parameter_dtype)

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the weight itself if the optimizer can update it, otherwise a float32 copy."""
        return LiveMaster(weight) if weight.dtype == self.gradient_dtype else Float32Master(weight)


def fp64(config: PrecisionConfig) -> Uniform:
    """Return double precision."""
    return Uniform(torch.float64, NoLossScale())


def fp32(config: PrecisionConfig) -> Uniform:
    """Return single precision."""
    return Uniform(torch.float32, NoLossScale())


def bf16(config: PrecisionConfig) -> Uniform:
    """Return bfloat16 with float32 gradients and masters."""
    return Uniform(torch.bfloat16, NoLossScale())


def fp16(config: FP16Config) -> Uniform:
    """Return float16 with float32 gradients and masters and a dynamic loss scale."""
    return Uniform(torch.float16, DynamicLossScale(config.initial_scale, config.growth_interval))
