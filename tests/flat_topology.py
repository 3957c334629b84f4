"""A plugin in one file: a topology of data and tensor parallelism, and nothing else."""

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.layout.layout import Layout, View


@attrs.define(frozen=True, kw_only=True)
class FlatConfig:
    """``[topology] use = "flat"``."""

    tp: int = 1
    """Ranks that share one layer."""
    way: int = 1
    """No dimension."""


@hookimpl
def nanotrain_register_topology(register):
    register(Component(name="flat", config=FlatConfig, factory=f"{__name__}:Flat", summary="dp x tp"))


class Flat:
    def __init__(self, config):
        self.config = config

    def layout(self, world_size):
        dp, rest = divmod(world_size, self.config.tp)
        if rest:
            raise ValueError(f"{world_size} does not divide")
        return Layout({"dense": View(("dp", "tp"), (dp, self.config.tp))})
