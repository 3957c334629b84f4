"""Adapts a model, an optimizer and loaders of your own to the engine, without a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from attrs.converters import optional
from attrs.validators import ge, in_
from torch import nn
from torch.nn import functional as F

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.builtin.configs import AccumulateConfig, FP16Config, SimpleCheckpointConfig
from nanotrain_core.compose import Run
from nanotrain_core.contracts import GradientSync, Kernels, LossScale, Monitor, PartOutput
from nanotrain_core.errors import NanotrainError, expect_result
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.initialization import equalize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.kernels import installed_kernels
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.loss_scale import DynamicLossScale, NoLossScale
from nanotrain_core.recipe.tree import EvaluationConfig, LRScheduleConfig, OptimizerConfig
from nanotrain_core.run.current_device import make_current
from nanotrain_core.script.checkpoint import ScriptCheckpoint, claim
from nanotrain_core.script.feed import LoaderFeed
from nanotrain_core.script.optimizer import ScriptOptimizer

#: Takes the model's output and targets; returns the *sum* of the loss over all predicted positions.
LossSum = Callable[[Any, torch.Tensor], torch.Tensor]


@attrs.define(frozen=True, kw_only=True)
class ScriptConfig:
    """The settings of a script's run, as a recipe has them."""

    name: str = "script"
    accumulate: int = attrs.field(default=1, validator=ge(1))
    """Loader batches per optimizer step."""
    clip_norm: float = attrs.field(default=0.0, validator=ge(0.0))
    """Maximum global gradient norm; 0 never clips."""
    lr_schedule: LRScheduleConfig = attrs.field(factory=LRScheduleConfig)
    evaluate_every: int = attrs.field(default=0, validator=ge(0))
    """Steps between evaluations; 0 evaluates only at the end."""
    log_every: int = attrs.field(default=1, validator=ge(1))
    precision: Literal["fp32", "bf16", "fp16"] = attrs.field(
        default="fp32", validator=in_(("fp32", "bf16", "fp16"))
    )
    """`fp32` calls the model unchanged. `bf16` and `fp16` call model and loss under `torch.autocast`, and
    do not cast weights; `fp16` also scales the loss, dynamically, as a recipe's `fp16` does."""
    folder: Path | None = attrs.field(default=None, converter=optional(Path))
    """Folder for checkpoints, in its subfolder `checkpoints/`; created if necessary. None saves nothing."""
    save_every: int = attrs.field(default=0, validator=ge(0))
    """Steps between checkpoints; 0 saves only at the end and when the run is stopped."""
    keep: int = attrs.field(default=2, validator=ge(1))
    """Number of newest checkpoints to keep."""
    resume: str | None = attrs.field(default=None, converter=optional(str))
    """`"auto"`: from the newest checkpoint of the folder, or the beginning if there is none; `"latest"`: from
    the newest; a step's number or a file's path: from that one. None starts from the beginning, in a folder
    without checkpoints."""

    def __attrs_post_init__(self) -> None:
        """Reject settings that need a folder without one.

        Raises:
            ValueError: naming the field.
        """
        for name in ("save_every", "resume"):
            if getattr(self, name) and self.folder is None:
                raise ValueError(f"ScriptConfig: {name} needs a folder for checkpoints: folder=...")


def cross_entropy_sum(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of logits [..., V], plain or under ``.logits``, against targets [...]."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def adapt(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ScriptConfig | None = None,
    *,
    callbacks: Sequence[Monitor] = (),
    loss: LossSum = cross_entropy_sum,
    gradient_sync: GradientSync | None = None,
    kernels: Kernels | None = None,
) -> Run:
    """Wrap a script's objects as a run.

    With several ranks rank 0 broadcasts its weights and buffers: ranks may have been initialized differently.

    Args:
        model: called as ``model(inputs)``, already on its device.
        optimizer: of the model's parameters.
        config: defaults train at a constant rate without clipping.
        callbacks: monitors.
        loss: sum of the loss; the engine divides by the global number of predicted positions.
        gradient_sync: sums gradients when the script's process group has several ranks.
        kernels: provide the transport between such ranks; by default those that ``auto`` selects.

    Raises:
        NanotrainError: there are several ranks without a gradient sync, or a DTensor.
        CheckpointError: the folder cannot be used, or has checkpoints and ``resume`` is not set.
        ValueError: the optimizer has parameters that are not the model's.
    """
    config = config or ScriptConfig()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout({"dense": View(("dp",), (ranks,))})
    device = make_current(next(model.parameters()).device)
    kernels = kernels or (installed_kernels(device) if ranks > 1 else Kernels())
    rank = dist.get_rank() if ranks > 1 else 0
    who = f"kernels {type(kernels).__name__}"
    transport = expect_result(who, "transport", kernels.transport(), Transport)
    mesh = Mesh(layout, rank=rank, device=device, transport=transport)
    placed = placed_parameters([model], place([model], layout))
    if sharded := next((each.placement.name for each in placed if each.dtensor is not None), None):
        raise NanotrainError(
            f"parameter {sharded} is a DTensor, as of fully_shard: scripts train plain tensors alone"
        )
    refuse_others_parameters(optimizer, model)
    equalize(placed, mesh)
    equalize_buffers(model, mesh)
    gradients = gradient_sync or LocalGradients()
    gradients.attach(placed, mesh, None, Passes())
    optimizer_config = OptimizerConfig(lr_schedule=config.lr_schedule, clip_norm=config.clip_norm)
    own = ScriptOptimizer(optimizer, placed, gradients, mesh, config.clip_norm)
    feed = LoaderFeed(config.accumulate, mesh, partial(own.begin, model), own.for_evaluation)
    return Run(
        name=config.name,
        recipe=config,
        mesh=mesh,
        stages={0: ScriptPart(model, loss, config.precision)},
        placed=placed,
        loss_weights={"lm": 1.0},
        flops_per_token=6.0 * sum(p.numel() for p in model.parameters()),
        gradients=gradients,
        optimizer=own,
        optimizer_config=optimizer_config,
        loss_scale=loss_scale(config),
        actions=Accumulate(AccumulateConfig()).actions(1, config.accumulate)[0],
        feed=feed,
        evaluation=EvaluationConfig(every=config.evaluate_every),
        checkpoint=checkpoint(config, model, own, feed),
        monitors=callbacks,
        log_every=config.log_every,
    )


def loss_scale(config: ScriptConfig) -> LossScale:
    """Return a dynamic loss scale for float16, with a recipe's defaults; none for other dtypes."""
    if config.precision != "fp16":
        return NoLossScale()
    scale = FP16Config()
    return DynamicLossScale(scale.initial_scale, scale.growth_interval)


def checkpoint(
    config: ScriptConfig, model: nn.Module, optimizer: ScriptOptimizer, feed: LoaderFeed
) -> ScriptCheckpoint | None:
    """Return the checkpoint component of the run, if it has a folder."""
    if config.folder is None:
        return None
    claim(config.folder, config.resume)
    return ScriptCheckpoint(
        SimpleCheckpointConfig(every=config.save_every, keep=config.keep),
        model,
        optimizer,
        feed,
        config.resume,
    )


def refuse_others_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of parameters that are not the model's.

    Their gradients would not be reduced, zeroed, clipped or unscaled, and no checkpoint would have them.

    Raises:
        ValueError: with their number, and the shape of the first.
    """
    own = {*model.parameters()}
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
    if others:
        raise ValueError(
            f"the optimizer has {len(others)} parameters that are not the model's, the first of shape "
            f"{tuple(others[0].shape)}: they would not be trained correctly, nor saved; make them parameters "
            "of the model"
        )


def equalize_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast rank 0's buffers, such as the statistics of batch norm."""
    for buffer in model.buffers() if mesh.world_size > 1 else ():
        same = buffer.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(same.view(-1).view(torch.uint8), src=0)  # backends do not know all dtypes
        buffer.detach().copy_(same)


class ScriptPart(nn.Module):
    """A plain model as its own single part.

    A model in evaluation mode, as ``from_pretrained`` of Hugging Face returns it, is put into training mode
    when it is trained; submodules that are in evaluation mode inside of one in training mode stay so.
    """

    def __init__(self, model: nn.Module, loss: LossSum, precision: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.__dict__["named_root"] = model  # by whose names parameters are known
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Return the loss sum, or the model's output without targets."""
        trains = self.training and torch.is_grad_enabled() and batch.targets is not None
        if trains and not self.model.training:
            self.model.train()
        with self.autocast(inputs.device):
            output = self.model(inputs)
            if batch.targets is None:
                return PartOutput(output)
            return PartOutput(None, {"lm": self.loss(output, batch.targets)})

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context of model and loss: a no-op without a low-precision dtype."""
        return torch.autocast(device.type, self.dtype) if self.dtype else nullcontext()
