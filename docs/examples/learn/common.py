"""What lessons 3 to 10 share: train a recipe on some ranks, and compare with one process."""

from pathlib import Path

import torch
import torch.distributed as dist

from nanotrain_core import RuntimeEngine
from nanotrain_core.api import box_slices, resolve_recipe
from nanotrain_core.api.torch import Monitor

LESSON = str(Path(__file__).with_name("lesson.toml"))


class Losses(Monitor):
    """Keeps the loss of every step."""

    def __init__(self):
        self.values = []

    def on_step(self, report):
        self.values.append(report.loss)


def engine_of(overrides, folder=None, resume=None):
    """Return this rank's engine for ``lesson.toml`` with ``overrides``, and the list of its losses."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found, losses = resolve_recipe(LESSON, overrides=overrides, ranks=ranks), Losses()
    engine = RuntimeEngine.from_recipe(
        found.recipe, registry=found.registry, rank=rank, folder=folder, resume=resume, callbacks=[losses]
    )
    return engine, losses.values


def train(overrides):
    """Train; return the losses, and of each parameter on this rank name, offset and weights."""
    engine, losses = engine_of(overrides)
    engine.fit()
    return losses, [
        (p.placement.name, tuple(p.placement.offset), p.parameter.detach().clone()) for p in engine.run.placed
    ]


def largest_difference(ranks, alone):
    """Return the largest difference between a rank's block and the same block of one process."""
    (_, whole), worst = alone, 0.0
    weights = {name: weight for name, _, weight in whole}
    for _, blocks in ranks:
        for name, offset, block in blocks:
            there = weights[name][box_slices(offset, block.shape)]
            worst = max(worst, (there - block).abs().max().item())
    return worst


def same(difference):
    """Return the difference in words: float64 has sixteen digits, and sums in another order lose some."""
    return "the same to 12 digits" if difference < 1e-12 else f"different by {difference:.1e}"


torch.set_num_threads(1)
