"""A plugin whose wrappers change which parameters a model has: they add some, or rename one."""

import attrs
import torch
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.contracts import Initializer, Parallel
from nanotrain_core.layout.placement import Placement
from nanotrain_core.layout.roles import Role, tagged


@attrs.define(frozen=True, kw_only=True)
class NoKeys:
    """A table without keys."""


class Adapters(Parallel):
    """Freezes a model and trains a scale beside each projection of queries."""

    def __init__(self, config):
        self.config = config

    def apply(self, part, placements, mesh):
        for parameter in part.parameters():
            parameter.requires_grad_(False)
        for name, module, tag in list(tagged(part)):
            if tag.role is Role.COLUMN and name.endswith(".q"):
                size = module.weight.shape[:1]
                module.scale = nn.Parameter(module.weight.new_empty(size, device="meta"))
                placements[f"{name}.scale"] = Placement.whole(f"{name}.scale", size, mesh.layout)
                module.register_forward_hook(lambda module, inputs, out: out * module.scale)
        self.initialize(part)
        return part

    def initialize(self, part):
        given = part.initializer
        part.initializer = lambda name: (
            Initializer("constant", 1.0) if name.endswith(".scale") else given(name)
        )


class Renames(Adapters):
    """Keeps the final norm's weight under another name."""

    def apply(self, part, placements, mesh):
        norm = part.norm
        norm.gain = nn.Parameter(torch.empty_like(norm.weight, device="meta"))
        placements["norm.gain"] = attrs.evolve(placements["norm.weight"], name="norm.gain")
        given = part.initializer
        part.initializer = lambda name: given(name.replace("gain", "weight"))
        del norm.weight
        return part


class Temperature(Parallel):
    """Scales queries by one number for the model, which each part holds."""

    def __init__(self, config):
        self.size = 1

    def op_wrappers(self, mesh):
        return {"attention": lambda attend, q, *args: attend(q * self.part.temperature.mean(), *args)}

    def apply(self, part, placements, mesh):
        self.part, given = part, part.initializer
        part.temperature = nn.Parameter(torch.empty(self.size, device="meta"))
        placements["temperature"] = Placement.whole("temperature", (self.size,), mesh.layout)
        part.initializer = lambda name: Initializer("constant", 0.7) if name == "temperature" else given(name)
        return part


class TemperatureOfLayers(Temperature):
    """Has numbers of its own in each part, under one name."""

    def apply(self, part, placements, mesh):
        self.size = 1 + len(part.layers) + bool(part.part.has_head)
        return super().apply(part, placements, mesh)


class TemperatureOfOnePart(Temperature):
    """Trains the number of the last part only."""

    def apply(self, part, placements, mesh):
        super().apply(part, placements, mesh).temperature.requires_grad_(part.part.has_head)
        return part


class Parts(Parallel):
    """Scales what a norm returns by a number whose gradient is another on each rank of ``tp``."""

    summed = False

    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        norm, rank = part.norm, mesh.coordinate("tp")
        norm.scale = nn.Parameter(torch.empty(1, device="meta"))
        placed = Placement.whole("norm.scale", (1,), mesh.layout)
        placements["norm.scale"] = placed.sum_over("tp") if self.summed else placed

        def hook(norm, inputs, out):
            return out * (norm.scale * (1 + rank) - norm.scale.detach() * rank)

        norm.register_forward_hook(hook)
        given = part.initializer
        part.initializer = lambda name: Initializer("constant", 1.0) if name == "norm.scale" else given(name)
        return part


class SummedParts(Parts):
    """Says so."""

    summed = True


class GradientHook(Parallel):
    """Halves a gradient by a hook of its parameter."""

    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        self.register(part.layers["0"].attn.q.weight)
        return part

    def register(self, parameter):
        parameter.register_hook(lambda gradient: gradient * 0.5)


class AccumulatedHook(GradientHook):
    """Likewise, when it has been accumulated."""

    def register(self, parameter):
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))


@hookimpl
def nanotrain_register_parallel(register):
    for cls in (
        Adapters,
        Renames,
        Temperature,
        TemperatureOfLayers,
        TemperatureOfOnePart,
        Parts,
        SummedParts,
        GradientHook,
        AccumulatedHook,
    ):
        name, dims = cls.__name__.lower(), {"tp"} if issubclass(cls, Parts) else set()
        factory = f"{__name__}:{cls.__name__}"
        register(Component(name=name, config=NoKeys, factory=factory, summary=name, mesh_dims=dims))
