"""A plugin in one file: topologies of data and tensor parallelism, and of two data dimensions without dp."""

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


@attrs.define(frozen=True, kw_only=True)
class HybridConfig:
    """``[topology] use = "hybrid"``."""

    copies: int = 1
    """Ranks with one shard of the state; all read sequences of their own."""
    tp: int = 1
    """Ranks that share one layer."""


@hookimpl
def nanotrain_register_topology(register):
    register(Component(name="flat", config=FlatConfig, factory=f"{__name__}:Flat", summary="dp x tp"))
    factory = f"{__name__}:Hybrid"
    register(Component(name="hybrid", config=HybridConfig, factory=factory, summary="copies x shards x tp"))


class Flat:
    def __init__(self, config):
        self.config = config

    def layout(self, world_size):
        dp, rest = divmod(world_size, self.config.tp)
        if rest:
            raise ValueError(f"{world_size} does not divide")
        return Layout({"dense": View(("dp", "tp"), (dp, self.config.tp))})


class Hybrid:
    def __init__(self, config):
        self.config = config

    def layout(self, world_size):
        copies, tp = self.config.copies, self.config.tp
        shards, rest = divmod(world_size, copies * tp)
        if rest:
            raise ValueError(f"{world_size} ranks do not divide by {copies * tp}")
        view = View(("copies", "shards", "tp"), (copies, shards, tp))
        return Layout({"dense": view}, data_dims=("copies", "shards"))
