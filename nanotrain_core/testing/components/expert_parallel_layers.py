"""The implementation of ``spread``: all-gather tokens along ep, compute local experts, reduce-scatter.

Ranks along ep are data-parallel ones with as many tokens each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.contracts import Parallel
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placement, Placements
from nanotrain_core.layout.roles import Role, override_forward, tagged
from nanotrain_core.moe.routing import Routing, run_locally


def gathered(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """All-gather: return the rows of all ranks along ep, [ep * B, ...]."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(mesh.size("ep"))]
    dist.all_gather(found, x.contiguous(), group=mesh.group("ep"))
    return torch.cat(found)


def scattered(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Reduce-scatter: return this rank's rows of the sum over ranks along ep."""
    total = x.clone(memory_format=torch.contiguous_format)
    mesh.all_reduce(total, "ep")
    return total.chunk(mesh.size("ep"))[mesh.coordinate("ep")]


class Gather(torch.autograd.Function):
    """All-gather forward; backward each rank gets the sum of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return gathered(x, mesh)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered(d_x, ctx.mesh), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return scattered(x, mesh)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(d_x, ctx.mesh), None


class Spread(Parallel):
    """See :class:`~nanotrain_core.contracts.Parallel`. The number of experts must divide."""

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Leave this rank its experts of each layer."""
        if mesh.size("ep") == 1:
            return part

        def forward(module: nn.Module, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
            every: torch.Tensor = Gather.apply(x_BSD, mesh)  # type: ignore[no-untyped-call]
            weights: torch.Tensor = Gather.apply(routing.weights, mesh)  # type: ignore[no-untyped-call]
            count = len(next(module.parameters()))
            chosen = gathered(routing.experts, mesh) - count * mesh.coordinate("ep")
            mine = (chosen >= 0) & (chosen < count)
            local = replace(routing, experts=torch.where(mine, chosen, 0), weights=weights * mine)
            partial = run_locally(module.compute, every, local, count)  # type: ignore[arg-type]
            result: torch.Tensor = Scatter.apply(partial, mesh)  # type: ignore[no-untyped-call]
            return result

        for name, module, found in list(tagged(part)):
            if found.role is Role.EXPERTS:
                for key, parameter in list(module.named_parameters()):
                    _slice(module, key, parameter, f"{name}.{key}", placements, mesh)
                override_forward(module, forward)
        return part


def _slice(
    module: nn.Module, key: str, old: nn.Parameter, name: str, placements: Placements, mesh: Mesh
) -> None:
    """Leave this rank its experts of the parameter ``key``."""
    whole = Placement.whole(name, placements[name].global_shape, mesh.layout, view="expert")
    placements[name] = whole.split(0, "ep", mesh.coordinate("ep"), mesh.size("ep"))
    block = torch.empty(placements[name].shape, dtype=old.dtype, device=old.device)
    owner, _, last = key.rpartition(".")
    setattr(module.get_submodule(owner), last, nn.Parameter(block, requires_grad=old.requires_grad))
