"""A wrapper that scales what routers and experts are given, each by one number, in a pre-hook."""

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


@hookimpl
def nanotrain_register_parallel(register):
    register(Component(name="scaled", config=NoKeys, factory=f"{__name__}:ScaledInputs", summary="scales"))
