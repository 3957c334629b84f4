"""The other side of ZeRO: torch's own sharded optimizer and data parallelism around the same Llama.

ZeRO-1 is ``DistributedDataParallel`` with ``ZeroRedundancyOptimizer``; ZeRO-2 is FSDP2's ``fully_shard``
that keeps weights gathered after the forward pass, and ZeRO-3 the one that does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import Llama, Loop, training
from nanotrain_core.recipe.tree import Recipe


class ZeroLoop(Loop):
    """The plain loop with optimizer-state sharding."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        super().__init__(recipe, model)
        c, groups = self.config, self.optimizer.param_groups
        kinds = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
        self.optimizer = ZeroRedundancyOptimizer(
            kinds, torch.optim.AdamW, lr=c.lr, betas=c.betas, eps=c.eps, fused=True
        )


class FullyShardedLoop(Loop):
    """The plain loop under FSDP2, which sums gradients in the last microbatch."""

    @contextlib.contextmanager
    def _sync(self, *, last: bool) -> Any:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        yield


def zero_redundancy(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more under DDP and ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(_model(recipe), gradient_as_bucket_view=True)
    return training(ZeroLoop(recipe, model), recipe, rank)


def fsdp(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more under FSDP2, weights kept from forward to backward."""
    return _fully_sharded(recipe, rank, reshard=False)


def fsdp_reshard(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more under FSDP2, weights gathered again for backward."""
    return _fully_sharded(recipe, rank, reshard=True)


def _fully_sharded(recipe: Recipe, rank: int, *, reshard: bool) -> Callable[[int], object]:
    model = _model(recipe)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return training(FullyShardedLoop(recipe, model), recipe, rank)


def _model(recipe: Recipe) -> Llama:
    torch.manual_seed(recipe.run.seed)
    return Llama(recipe.model.config, recipe.batch.length)
