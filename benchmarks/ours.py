"""Our side: the engine, built from the case's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from nanotrain_core.batch import Shard
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import load_plugins

Microbatches = list[tuple[torch.Tensor, torch.Tensor]]


def engine(recipe: Recipe, rank: int, local: Iterable[str] = ()) -> Callable[[int], object]:
    """Return what trains for so many steps more, through ``fit`` as every user's run does.

    Args:
        recipe: of the case.
        rank: this process's.
        local: files to load as plugins.
    """
    ours = RuntimeEngine.from_recipe(recipe, registry=load_plugins(local=local), rank=rank)
    return lambda steps: ours.fit(steps=ours.step + steps)


def batches(recipe: Recipe, rank: int) -> Iterator[Microbatches]:
    """Yield this rank's microbatches of tokens and targets [B, S], those that the engine draws."""
    data = load_plugins().get("data", recipe.data.use).build(recipe.data.config)
    data.open(length=recipe.batch.length, seed=recipe.run.seed)
    degrees = recipe.topology.config
    data_ranks = recipe.run.ranks // (degrees.tp * degrees.pp)
    # The grid's order: pipeline stages slowest, tensor-parallel ranks next to each other.
    shard = Shard(rank // degrees.tp % data_ranks, data_ranks)
    while True:
        batch = data.train_batch(recipe.batch.sequences, shard)
        yield [(micro.tokens, micro.targets) for micro in batch.split(recipe.batch.microbatch)]
