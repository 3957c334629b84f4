"""Builds the objects of one rank's run from a resolved recipe, in the order of their dependencies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from nanotrain_core.batch import Shard
from nanotrain_core.compile.apply import compile_parts
from nanotrain_core.compile.options import group_timeout
from nanotrain_core.contracts import (
    Checkpoint,
    Data,
    GathersWeights,
    GradientSync,
    LossScale,
    Model,
    Monitor,
    Optimizer,
)
from nanotrain_core.errors import expect_result
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placements
from nanotrain_core.layout.staging import StagedTransport
from nanotrain_core.layout.transport import Transport
from nanotrain_core.moe.routing import any_routers
from nanotrain_core.optim.gathering import GatheringOptimizer
from nanotrain_core.phases.in_run import RunPhases
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.pipeline.actions import Action, describe_stages
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.quantized_storage import release_unquantized
from nanotrain_core.recipe.tree import EvaluationConfig, OptimizerConfig, Recipe, Selection
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.components import Components
from nanotrain_core.run.current_device import make_current
from nanotrain_core.run.evaluation import ValidationSums
from nanotrain_core.run.feed import DataFeed, Feed
from nanotrain_core.run.memory import expect_training_to_fit
from nanotrain_core.run.model_parts import (
    pipeline_rank,
    with_precision_and_kernels,
    with_weights,
    wrapped_stages,
)
from nanotrain_core.run.validate_components import (
    check_costs,
    check_dtensors,
    check_loss_weights,
    check_meta,
    check_ranges,
    check_vocabulary,
    expect_lengths,
)


@attrs.define(frozen=True, eq=False, kw_only=True)
class Run:
    """The objects that the step loop works with, from a recipe or from a script."""

    name: str
    recipe: Any
    """The recipe, or a script's config."""
    seed: int = 0
    """``run.seed``: of initial weights, data and random-number streams."""
    mesh: Mesh
    stages: Mapping[int, nn.Module]
    """This rank's model parts by stage number."""
    owners: Sequence[int] = (0,)
    """The pipeline rank of every stage of the model."""
    has_routers: bool = False
    """Whether any stage of the model has a router that counts the tokens of each expert."""
    placed: Sequence[PlacedParameter]
    """This rank's parameters with their placements, in model order."""
    placements: Placements = attrs.field(factory=dict)
    """Placements of parameters and buffers by name. Empty in a script."""
    frozen: frozenset[str] = frozenset()
    """Names of this rank's parameters that keep their values. None in a script, which may change any."""
    model: Selection | None = None
    """The recipe's model: a checkpoint of another one is rejected. None in a script."""
    adding: Collection[str] = ()
    """The names of all wrappers that add parameters to a model, selected or not."""
    loss_weights: Mapping[str, float]
    """By loss term: its factor in the training loss."""
    flops_per_token: float
    """Of forward and backward, of the whole model."""
    gradients: GradientSync
    """The component that provides ``gradient_sync``, or the core's ``AllReduceGradients``."""
    optimizer: Optimizer
    optimizer_config: OptimizerConfig
    loss_scale: LossScale
    actions: Sequence[Action]
    """This rank's actions of the schedule."""
    schedule: Sequence[Sequence[Action]] = ()
    """The actions of every pipeline rank."""
    pipeline_share: float = 1.0
    """FLOPs of this rank's stages over the mean of pipeline ranks."""
    passes: Passes = attrs.field(factory=Passes)
    """What layers may query about the current pass."""
    cuda_graphs: bool = False
    """Whether microbatches are replayed from a CUDA graph."""
    feed: Feed
    phases: RunPhases | None = None
    """What the recipe changes during the run; None in a script."""
    evaluation: EvaluationConfig
    checkpoint: Checkpoint | None = None
    monitors: Sequence[Monitor] = ()
    strict_monitors: bool = False
    log_every: int = 1
    descriptions: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    """Lines for people, by what they are about: ``schedule`` (how the model is split into stages),
    ``kernels``, ``precision``, ``compile``."""

    def validation_sums(self) -> ValidationSums:
        """Return sums of every loss term over validation batches, to which nothing was added yet."""
        return ValidationSums(self.loss_weights, self.mesh)

    @property
    def described(self) -> Sequence[str]:
        """All lines of :attr:`descriptions`."""
        return tuple(line for lines in self.descriptions.values() for line in lines)


def compose(
    recipe: Recipe,
    registry: Registry,
    *,
    rank: int = 0,
    device: torch.device | str = "cpu",
    weights: str | None = None,
    make_mesh: Callable[..., Mesh] | None = None,
    trains: bool = True,
) -> Run:
    """Build this rank's run. Collective over the world: every rank must call it with an equal recipe.

    Args:
        recipe: resolved.
        registry: the plugins.
        rank: the rank of this process.
        device: where it computes; on ``meta`` tensors have shapes but no values, for a dry run.
        weights: initial weights instead of random ones.
        make_mesh: called instead of :class:`Mesh`: a dry run has no other ranks to communicate with.
        trains: false omits gradients and the optimizer's state, where only forward passes are wanted.

    Raises:
        NanotrainError: the recipe cannot be run: a component violates its contract (PluginError), data or
            weights do not fit the model, or the run does not fit into memory.
    """
    device = make_current(device)
    built, passes = Components.of(recipe, registry, device), Passes()
    _open(built.data, built.model, recipe)
    built.kernels.prepare(device)
    built.precision.setup(recipe.run.seed, passes, built.kernels.gemm())
    built.optimizer.kernels = built.kernels
    mesh = _mesh(built, recipe, rank, device, make_mesh or Mesh)
    check_meta(built.data, mesh, recipe)

    # The parts of the model that each rank owns during the whole run, and what it does with them in a step.
    pp, pp_rank = mesh.degree("pp"), pipeline_rank(mesh)
    costs = built.model.flops(PhaseTimeline(recipe).largest().batch.length)  # FLOPs per token, by layer
    check_costs(costs, built.model, recipe)
    check_loss_weights(built.model, recipe)
    parts = built.schedule.parts(costs, pp)
    rows = _shard(mesh, mesh.layout.row_dims)
    actions = built.schedule.actions(pp, recipe.batch.microbatches(rows.count))
    phases = RunPhases(recipe, built.model, built.schedule, pp, rows.count)
    passes.splits_backward = phases.split_backward(actions)

    stages, frozen, placements = wrapped_stages(built, recipe, parts, mesh)
    stages = with_precision_and_kernels(built, stages, mesh, passes)
    compiled = compile_parts(stages.values(), recipe, registry, mesh, placements, passes)
    placed = with_weights(built, recipe, registry, stages, placements, mesh, weights)
    gradients, optimizer = _gradient_sync(recipe, registry, built, placed)
    if trains:
        gradients.attach(placed, mesh, built.precision.gradient_dtype, passes)
        check_ranges(gradients, optimizer, recipe, registry)
        optimizer.setup(placed, built.precision, gradients, mesh)
        expect_training_to_fit(placed, gradients, optimizer, built.precision, recipe, mesh)
    for parameter in placed:
        release_unquantized(parameter.parameter)

    return Run(
        name=recipe.run.name,
        recipe=recipe,
        seed=recipe.run.seed,
        mesh=mesh,
        stages=stages,
        owners=[part.rank for part in parts],
        has_routers=any_routers(stages.values(), mesh),
        placed=placed,
        placements=placements,
        frozen=frozen,
        model=recipe.model,
        adding=[added.name for plugin in registry.plugins for _, added in plugin.components if added.added],
        loss_weights=built.model.loss_weights,
        flops_per_token=costs.total,
        gradients=gradients,
        optimizer=optimizer,
        optimizer_config=recipe.optimizer.config,
        loss_scale=built.precision.loss_scale,
        actions=actions[pp_rank],
        schedule=actions,
        pipeline_share=pp * sum(costs.of(part) for part in parts if part.rank == pp_rank) / costs.total,
        passes=passes,
        cuda_graphs=recipe.run.cuda_graphs,
        feed=DataFeed(
            built.data,
            built.model,
            recipe.batch,
            recipe.evaluation,
            rows,
            mesh.device,
            part=_shard(mesh, mesh.layout.sequence_dims),
        ),
        phases=phases,
        evaluation=recipe.evaluation,
        checkpoint=built.checkpoint,
        monitors=built.monitors,
        strict_monitors=recipe.run.strict_monitors,
        log_every=recipe.run.log_every,
        descriptions={
            "schedule": [describe_stages(parts, costs)] if pp > 1 else [],
            **_descriptions(built, recipe),
            "compile": compiled,
        },
    )


def _mesh(
    built: Components, recipe: Recipe, rank: int, device: torch.device, make_mesh: Callable[..., Mesh]
) -> Mesh:
    """Create this rank's mesh, with the transport of the kernels. Collective over the world."""
    found = built.kernels.transport()
    transport = expect_result(f"kernels '{built.kernels_name}'", "transport", found, Transport)
    return make_mesh(
        built.topology.layout(recipe.run.ranks),
        rank=rank,
        device=device,
        timeout=group_timeout(recipe, device.type),
        transport=StagedTransport() if recipe.run.share_device else transport,
    )


def _descriptions(built: Components, recipe: Recipe) -> dict[str, Sequence[str]]:
    """Return lines on the kernels that ``auto`` has selected, and those of the precision."""
    automatic = recipe.kernels.use != built.kernels_name
    precision = f"precision '{recipe.precision.use}'"
    return {
        "kernels": [f"kernels: {built.kernels_name}"] if automatic else [],
        "precision": expect_result(precision, "describe", built.precision.describe(), Sequence),
    }


def _open(data: Data, model: Model, recipe: Recipe) -> None:
    """Open the data for sequences of all lengths that the run uses."""
    expect_lengths(data, recipe)
    data.open(length=recipe.batch.length, seed=recipe.run.seed)
    check_vocabulary(data, model, recipe)


def _shard(mesh: Mesh, dims: Sequence[str]) -> Shard:
    """Return this rank's share of what is divided along ``dims``."""
    return Shard(mesh.coordinate(*dims), mesh.size(*dims))


def _gradient_sync(
    recipe: Recipe, registry: Registry, built: Components, placed: Sequence[PlacedParameter]
) -> tuple[GradientSync, Optimizer]:
    """Return the component that provides gradient sync, or the core's default, and the optimizer.

    A gradient sync that shards gathers weights after each step of an optimizer that is unaware of sharding.
    """
    optimizer = built.optimizer
    components: Sequence[tuple[Selection, Any]] = [*built.wrappers, (recipe.optimizer, optimizer)]
    for selection, component in components:
        if "gradient_sync" in registry.get(selection.kind, selection.use).provides:
            check_dtensors(placed, component)
            apart = component is not optimizer and isinstance(component, GathersWeights)
            return component, GatheringOptimizer(optimizer, component) if apart else optimizer
    default = AllReduceGradients()
    check_dtensors(placed, default)
    return default, optimizer
