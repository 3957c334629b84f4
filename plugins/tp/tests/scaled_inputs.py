"""Wrappers that scale, each by one number, what routers and experts are given, or the last norm returns."""

import attrs
import torch
from torch import nn

from nanotrain_core.api import Component, Role, hookimpl, tagged
from nanotrain_core.api.torch import Initializer, Parallel, Placement


@attrs.define(frozen=True)
class NoKeys:
    """A table without keys."""


class ScaledInputs(Parallel):
    """Knows nothing of other wrappers."""

    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        for name, module, tag in list(tagged(part)):
            if tag.role in (Role.ROUTER, Role.EXPERTS):
                module.scale = nn.Parameter(torch.empty(1, device="meta"))
                placements[f"{name}.scale"] = Placement.whole(f"{name}.scale", (1,), mesh.layout)
                module.register_forward_pre_hook(lambda module, args: (args[0] * module.scale, *args[1:]))
        given = part.initializer
        part.initializer = lambda n: Initializer("constant", 0.7) if n.endswith(".scale") else given(n)
        return part


class Complete(torch.autograd.Function):
    """Megatron's f: identity forward, sum over ranks backward."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.mesh.degree("tp") > 1:
            ctx.mesh.all_reduce(gradient, "tp")
        return gradient, None


class ScaledNorm(Parallel):
    """Sums its gradient over ranks itself, and is placed as whole; or is left partial, and says so."""

    completes = True

    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        norm, name = part.norm, "norm.scale"
        norm.scale = nn.Parameter(torch.empty(1, device="meta"))
        placed = Placement.whole(name, (1,), mesh.layout)
        placements[name] = placed if self.completes else placed.sum_over("tp")

        def hook(norm, args, out):
            return out * (Complete.apply(norm.scale, mesh) if self.completes else norm.scale)

        norm.register_forward_hook(hook)
        given = part.initializer
        part.initializer = lambda n: Initializer("constant", 0.7) if n == name else given(n)
        return part


class SummedNorm(ScaledNorm):
    """Leaves the sum to whoever sums gradients."""

    completes = False


class ScaledQueries(Parallel):
    """Scales the inputs of queries' projections before hooks of other wrappers see them."""

    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        for name, module, tag in list(tagged(part)):
            if tag.role is Role.COLUMN and name.endswith(".q"):
                module.scale = nn.Parameter(torch.empty(1, device="meta"))
                placements[f"{name}.scale"] = Placement.whole(f"{name}.scale", (1,), mesh.layout)
                module.register_forward_pre_hook(
                    lambda module, args: (args[0] * module.scale, *args[1:]), prepend=True
                )
        given = part.initializer
        part.initializer = lambda n: Initializer("constant", 0.7) if n.endswith(".scale") else given(n)
        return part


@hookimpl
def nanotrain_register_parallel(register):
    for name, cls in (
        ("scaled", ScaledInputs),
        ("completed", ScaledNorm),
        ("summednorm", SummedNorm),
        ("queries", ScaledQueries),
    ):
        register(Component(name=name, config=NoKeys, factory=f"{__name__}:{cls.__name__}", summary=name))
