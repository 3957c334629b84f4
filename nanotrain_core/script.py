"""The engine's other door: a model, an optimizer and loaders of your own, no recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import torch
import torch.distributed as dist
from attrs.validators import ge
from torch import nn
from torch.nn import functional as F

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.builtin.configs import AccumulateConfig
from nanotrain_core.compose import Run
from nanotrain_core.contracts import (
    Block,
    GradientSync,
    Monitor,
    PartOutput,
    Precision,
    StepStats,
)
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, global_norm, place, placed_parameters
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.precision.uniform import NoLossScale
from nanotrain_core.recipe.tree import EvaluationConfig, OptimizerConfig, ScheduleConfig

Pair = tuple[torch.Tensor, torch.Tensor]
#: Yields ``(inputs, targets)`` or :class:`Batch`. Targets stand where they are predicted.
Loader = Iterable[Pair | Batch]
#: Takes the model's output and targets; returns the *sum* of the loss over all predicted positions.
LossSum = Callable[[Any, torch.Tensor], torch.Tensor]


@attrs.define(frozen=True, kw_only=True)
class ScriptConfig:
    """What a recipe would say, for a script."""

    name: str = "script"
    accumulate: int = attrs.field(default=1, validator=ge(1))
    """Loader batches per optimizer step."""
    clip_norm: float = attrs.field(default=0.0, validator=ge(0.0))
    """Largest global gradient norm; 0 never clips."""
    lr_schedule: ScheduleConfig = attrs.field(factory=ScheduleConfig)
    evaluate_every: int = attrs.field(default=0, validator=ge(0))
    """Steps between evaluations; 0 evaluates only at the end."""
    log_every: int = attrs.field(default=1, validator=ge(1))


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
) -> Run:
    """Dress a script's objects as a run.

    Args:
        model: called as ``model(inputs)``, on its device already.
        optimizer: of the model's parameters.
        config: defaults train without clipping at a constant rate.
        callbacks: monitors.
        loss: sum of the loss; the engine divides by the global number of predicted positions.
        gradient_sync: sums gradients when the script's process group has several ranks.

    Raises:
        ValueError: there are several ranks and nobody to sum their gradients.
    """
    config = config or ScriptConfig()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout({"dense": View(("dp",), (ranks,))})
    device = next(model.parameters()).device
    mesh = Mesh(layout, rank=dist.get_rank() if ranks > 1 else 0, device=device)
    placed = placed_parameters([model], place([model], layout))
    gradients = gradient_sync or LocalGradients()
    gradients.attach(placed, mesh, None)
    optimizer_config = OptimizerConfig(lr_schedule=config.lr_schedule, clip_norm=config.clip_norm)
    return Run(
        name=config.name,
        recipe=config,
        mesh=mesh,
        stages={0: ScriptPart(model, loss)},
        placed=placed,
        loss_weights={"lm": 1.0},
        flops_per_token=6.0 * sum(p.numel() for p in model.parameters()),
        gradients=gradients,
        optimizer=ScriptOptimizer(optimizer, placed, gradients, mesh, config.clip_norm),
        optimizer_config=optimizer_config,
        loss_scale=NoLossScale(),
        actions=Accumulate(AccumulateConfig()).actions(1, config.accumulate)[0],
        feed=LoaderFeed(config.accumulate, mesh),
        evaluation=EvaluationConfig(every=config.evaluate_every),
        monitors=callbacks,
        log_every=config.log_every,
    )


class ScriptPart(nn.Module):
    """A plain model as the only part of itself."""

    def __init__(self, model: nn.Module, loss: LossSum) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Return the loss sum, or the model's output where there are no targets."""
        output = self.model(inputs)
        if batch.targets is None:
            return PartOutput(output)
        return PartOutput(None, {"lm": self.loss(output, batch.targets)})


class Reached:
    """Which parameters the backward passes of a step have reached, on any rank.

    torch's optimizers skip a parameter without a gradient: they neither decay it nor move its moments.
    """

    def __init__(self, placed: Sequence[PlacedParameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.flags = [False] * len(placed)
        for index, each in enumerate(placed):
            if each.parameter.requires_grad:
                each.parameter.register_post_accumulate_grad_hook(self._setter(index))  # type: ignore[no-untyped-call]

    def _setter(self, index: int) -> Callable[[torch.Tensor], None]:
        flags = self.flags  # not the run: a tensor's hooks are out of the garbage collector's sight

        def reached(_: torch.Tensor) -> None:
            flags[index] = True

        return reached

    def take(self) -> list[bool]:
        """All-reduce: return a flag for each parameter, and forget them for the next step."""
        found = list(self.flags)
        self.flags[:] = [False] * len(found)
        if self.mesh.world_size == 1:
            return found
        numbers = torch.tensor(found, dtype=torch.int32, device=self.mesh.device)
        self.mesh.all_reduce(numbers)
        return [bool(number) for number in numbers.tolist()]


class ScriptOptimizer:
    """A torch optimizer that steps on the engine's gradients."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        placed: Sequence[PlacedParameter],
        gradients: GradientSync,
        mesh: Mesh,
        clip_norm: float,
    ) -> None:
        self.inner, self.placed, self.gradients, self.mesh = inner, placed, gradients, mesh
        self.clip_norm = clip_norm
        self.reached = Reached(placed, mesh)

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Nothing: the script made its optimizer."""

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Clip and update. A parameter that no backward reached, or is frozen, stays without gradient."""
        for placed, reached in zip(self.placed, self.reached.take(), strict=True):
            placed.parameter.grad = self.gradients.gradient(placed.parameter) if reached else None
        pairs = [(p.parameter.grad, p.placement) for p in self.placed if p.parameter.grad is not None]
        norm = global_norm(pairs, self.mesh)
        if not torch.isfinite(norm):
            return StepStats(norm, skipped=True)
        if self.clip_norm and pairs:
            torch._foreach_mul_([g for g, _ in pairs], (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self.inner.step()
        return StepStats(norm)

    def blocks(self) -> Iterable[Block]:
        """A script saves what it wants itself."""
        return ()

    def meta(self) -> dict[str, Any]:
        """No state of its own."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """No state of its own."""


class LoaderFeed:
    """Feeds from a script's loaders, going round the training loader as often as needed."""

    bytes_per_token: float | None = None

    def __init__(self, accumulate: int, mesh: Mesh) -> None:
        self.accumulate, self.mesh = accumulate, mesh
        self.data: Loader | None = None
        self.skipped: list[tuple[int, int]] = []
        self.tokens_per_step = self.tokens = 0

    def use(self, train: Loader | None, validation: Loader | None) -> None:
        """Take the loaders of one call of fit.

        Raises:
            TypeError: there is no training loader.
        """
        if train is None:
            raise TypeError("fit needs a train_loader that yields (inputs, targets)")
        self.data, self.held_out = train, validation
        self.batches = self._forever(train)

    def _forever(self, loader: Loader) -> Iterator[Batch]:
        while True:
            empty = True
            for item in loader:
                empty = False
                yield self._batch(item)
            if empty:
                raise ValueError("the train_loader yields nothing")

    def _batch(self, item: Pair | Batch) -> Batch:
        batch = item if isinstance(item, Batch) else Batch(*item)
        return batch.to(self.mesh.device)

    def microbatches(self) -> list[Batch]:
        """Return the loader's next batches."""
        taken = list(islice(self.batches, self.accumulate))
        self.tokens_per_step = sum(batch.tokens.numel() for batch in taken) * self.mesh.world_size
        self.tokens += self.tokens_per_step
        return taken

    def validation(self) -> Iterator[Batch]:
        """Yield all validation batches."""
        return map(self._batch, self.held_out or ())

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the number of predicted positions."""
        return {"lm": batch.target_tokens()}

    def of_last(self, steps: int) -> tuple[int, int]:
        """A script saves nothing, so nothing goes back."""
        raise NotImplementedError

    def meta(self) -> dict[str, Any]:
        """A loader's position is the script's."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """A loader's position is the script's."""
