"""Topologies that lay out another degree than was asked for: see ``broken_twins.py``."""

import math

import attrs
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.layout.grid import Grid


class TakesWhatThereIs(Grid):
    """With too few ranks, ``tp`` is their number."""

    def __init__(self, config):
        super().__init__(config)
        self.asked = config

    def layout(self, world_size):
        return Grid(attrs.evolve(self.asked, tp=self.fitting(world_size))).layout(world_size)

    def fitting(self, world_size):
        return min(self.asked.tp, world_size)


class RoundsDown(TakesWhatThereIs):
    """``tp`` is the largest number that divides it and the ranks."""

    def fitting(self, world_size):
        return math.gcd(self.asked.tp, world_size)


class TakesNoneOfAnOddWorld(TakesWhatThereIs):
    """With an odd number of ranks, all are data-parallel."""

    def fitting(self, world_size):
        return 1 if world_size % 2 else self.asked.tp


@hookimpl
def nanotrain_register_topology(register):
    for cls in (TakesWhatThereIs, RoundsDown, TakesNoneOfAnOddWorld):
        register(twin(cls, configs.GridConfig))
