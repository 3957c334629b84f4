"""The other side of tensor and pipeline parallelism: torch's own parts around the same Llama.

Tensor parallelism is ``parallelize_module`` with sequence parallelism and ``loss_parallel``, as torch's
tutorials and torchtitan lay Llama out. Pipelines are ``torch.distributed.pipelining`` schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers import Llama, Loop, training
from nanotrain_core.pipeline.actions import Part, parts_between
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import load_plugins


class TensorLoop(Loop):
    """The plain loop under ``loss_parallel``, which keeps logits split over the vocabulary."""

    def step(self, microbatches: Any) -> torch.Tensor:
        with loss_parallel():
            return super().step(microbatches)

    @staticmethod
    def plain(loss: Any) -> torch.Tensor:
        return loss.full_tensor()


def tensor(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, the model split over all ranks."""
    torch.manual_seed(recipe.run.seed)
    model = Llama(recipe.model.config, recipe.batch.length)
    split(model, recipe.run.ranks)
    return training(TensorLoop(recipe, model), recipe, rank)


def split(model: Llama, ranks: int) -> None:
    """Lay the model out over ``ranks``, between layers split along the sequence."""
    mesh = init_device_mesh("cpu", (ranks,))
    around = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, around)
    whole, piece = (Replicate(), None, None), (Shard(1), None, None)
    for layer in model.layers:
        plan = {
            "attn_norm": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=piece, desired_input_layouts=whole),
            **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
            "attn.o": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
        layer.attn.heads //= ranks


#: Schedules of ours beside which torch runs its interleaved 1F1B.
INTERLEAVED = ("interleaved_1f1b", "torch_pipelining")


class Stage(nn.Module):
    """Consecutive layers of a Llama, with embedding and head at the ends."""

    def __init__(self, model: Llama, part: Part) -> None:
        super().__init__()
        self.layers = model.layers[part.first : part.last]
        self.embed = model.embed if part.has_embedding else None
        self.norm, self.head = (model.norm, model.head) if part.has_head else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def pipeline(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, layers split evenly as in torch's tutorials."""
    stages = recipe.run.ranks * (2 if recipe.schedule.use in INTERLEAVED else 1)
    each = recipe.model.config.layers // stages
    edges = [stage * each for stage in range(stages + 1)]
    return piped(recipe, rank, parts_between(edges, [stage % recipe.run.ranks for stage in range(stages)]))


def pipeline_balanced(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, the layers split as on our side."""
    found = load_plugins()
    costs = found.build(recipe.model).flops(recipe.batch.length)
    return piped(recipe, rank, found.build(recipe.schedule).parts(costs, recipe.run.ranks))


def piped(recipe: Recipe, rank: int, parts: Sequence[Part]) -> Callable[[int], object]:
    """Return what trains for so many steps more, with these stages."""
    torch.manual_seed(recipe.run.seed)
    count = recipe.batch.sequences // recipe.batch.microbatch
    model = Llama(recipe.model.config, recipe.batch.length)
    mine = [
        PipelineStage(Stage(model, part), number, len(parts), torch.device("cpu"))
        for number, part in enumerate(parts)
        if part.rank == rank
    ]
    schedule: Any = (
        ScheduleInterleaved1F1B(mine, count, loss_fn=loss)
        if recipe.schedule.use in INTERLEAVED
        else Schedule1F1B(mine[0], count, loss_fn=loss)
    )
    loop = PipelineLoop(recipe, nn.ModuleList(stage.submod for stage in mine), schedule)
    return training(loop, recipe, rank)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PipelineLoop(Loop):
    """The plain loop, whose microbatches a schedule takes through all ranks."""

    def __init__(self, recipe: Recipe, model: nn.Module, schedule: Any) -> None:
        super().__init__(recipe, model)
        self.schedule, self.rank, self.ranks = schedule, dist.get_rank(), dist.get_world_size()

    def step(self, microbatches: Any) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        tokens, targets = (torch.cat(each) for each in zip(*microbatches, strict=True))
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.rank == 0 else ()
        last = {"target": targets, "losses": losses} if self.rank == self.ranks - 1 else {}
        self.schedule.step(*inputs, **last)
        self._clip()
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def _clip(self) -> None:
        """Clip by the norm of all stages together."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(total)
        factor = (self.config.clip_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
