"""The implementation of ``sliced``: Megatron's f and g around linear layers, without optimizations.

Source: Shoeybi et al., arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import Parallel
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placements
from nanotrain_core.layout.roles import Role, share_tokens, tagged
from nanotrain_core.testing.components.sequence_parallel import SlicedTokens

#: The axis along which parameters of a role are split.
AXES = {Role.COLUMN: {"weight": 0, "bias": 0}, Role.ROW: {"weight": 1}}


class SumGradient(torch.autograd.Function):
    """Identity forward, all-reduce backward: each rank's gradient of a sharded layer's input is partial."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        d_x = d_x.clone(memory_format=torch.contiguous_format)
        ctx.mesh.all_reduce(d_x, "tp")
        return d_x, None


class SumOutput(torch.autograd.Function):
    """All-reduce forward, identity backward: each rank's product with some of the columns is partial."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        y = y.clone(memory_format=torch.contiguous_format)
        mesh.all_reduce(y, "tp")
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_y, None


class Sliced(Parallel):
    """See :class:`~nanotrain_core.contracts.Parallel`. The units of every linear layer must divide."""

    def __init__(self, sequence_parallel: bool = False) -> None:
        self.sequence_parallel = sequence_parallel

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Keep this rank's shards of COLUMN and ROW, and record which other gradients are partial."""
        if mesh.size("tp") == 1:
            return part
        tokens = SlicedTokens(part, mesh) if self.sequence_parallel else None
        for name, module, found in tagged(part):
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            axes = {key: 0 for key, _ in own} if found.role is Role.PER_HEAD else AXES.get(found.role, {})
            for key, axis in axes.items():
                slice_parameter(module, key, axis, f"{name}.{key}", placements, mesh)
            if tokens:
                tokens.hook(module, found)
            else:
                hook(module, found.role, mesh)
        routers, inner = (set(parameters_of(part, role)) for role in (Role.ROUTER, Role.INNER))
        partial = {name for name, _ in part.named_parameters()} - routers if tokens else inner
        for name in partial:
            if "tp" in placements[name].same:  # else it is sharded
                placements[name] = placements[name].sum_over("tp")
        return part


def hook(module: nn.Module, role: Role, mesh: Mesh) -> None:
    """Install the all-reduces of a role whose module is told whole sequences."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return SumGradient.apply(args[0], mesh), *args[1:]  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        bias: Any = getattr(module, "bias", None)
        own = y if bias is None else y - bias  # every rank has added it
        total: torch.Tensor = SumOutput.apply(own, mesh)  # type: ignore[no-untyped-call]
        return total if bias is None else total + bias

    if role in (Role.COLUMN, Role.SHARED):
        module.register_forward_pre_hook(enter)
    elif role is Role.ROW:
        module.register_forward_hook(leave)
    elif role is Role.EXPERTS:
        share_tokens(module, "tp")  # they are whole on every rank, and so is what they are told


def parameters_of(part: nn.Module, role: Role) -> Iterator[str]:
    """Yield the names of all parameters in and below modules of a role."""
    for name, module, found in tagged(part):
        if found.role is role:
            yield from (f"{name}.{key}" for key, _ in module.named_parameters())


def slice_parameter(
    module: nn.Module, key: str, axis: int, name: str, placements: Placements, mesh: Mesh
) -> None:
    """Leave this rank its block along ``axis`` of a parameter or buffer of ``module``, if it has one."""
    old = getattr(module, key, None)
    if old is None:
        return
    placement = placements[name].split(axis, "tp", mesh.coordinate("tp"), mesh.size("tp"))
    placements[name] = placement
    block = torch.empty(placement.shape, dtype=old.dtype, device=old.device)
    parameter = isinstance(old, nn.Parameter)
    setattr(module, key, nn.Parameter(block, requires_grad=old.requires_grad) if parameter else block)
