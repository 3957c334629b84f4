"""Executes one step of a schedule on this rank: a list of actions over stages and microbatches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts import Computed, GradientSync, PartOutput
from nanotrain_core.errors import NanotrainError, PluginError, did_you_mean
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.annotation import annotated
from nanotrain_core.pipeline.p2p import StageP2P
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients

Losses = dict[str, torch.Tensor]


@attrs.define(frozen=True, eq=False)
class PendingForward:
    """A forward pass waiting for its backward."""

    inputs: torch.Tensor
    output: PartOutput


class Executor:
    """Executes forward, backward and weight-gradient actions on the stages of this rank."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        gradients: GradientSync,
        mesh: Mesh,
        owners: Sequence[int] = (0,),
        passes: Passes | None = None,
    ) -> None:
        """Set up communication between stages. Collective over the pipeline.

        Args:
            stages: this rank's stages, by number.
            gradients: notified of every microbatch.
            mesh: of the run.
            owners: the pipeline rank of every stage of the model.
            passes: the object that layers query; this executor keeps it up to date.
        """
        self.passes = passes or Passes()
        self.stages, self.gradients, self.mesh = stages, gradients, mesh
        self.owners, self.final = owners, len(owners) - 1
        self.p2p = StageP2P(owners, mesh)
        self._parameters = {number: tuple(part.parameters()) for number, part in stages.items()}
        self.idle = 0.0
        """Fraction of the last step's time in which the host waited for other stages."""

    # --- training -----------------------------------------------------------------------------

    def check_model(self) -> None:
        """Discard what is cached of the model if a script has changed it since the last ``fit``.

        This executor caches nothing.
        """

    def run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Batch],
        loss_factors: Mapping[str, torch.Tensor],
    ) -> Losses:
        """Run ``actions`` and return the detached sum of each loss term over the microbatches.

        With one stage they are F0 B0 F1 B1 ..., and there are no sends or receives. No weight changes while
        they run, so cached quantized copies stay valid.

        Args:
            actions: this rank's list.
            microbatches: this rank's shard of the global batch, by microbatch number.
            loss_factors: the factor of each loss sum before backward: its weight in the training loss times
                the loss scale, over its global count.

        Returns:
            Sums over this rank's stages and data only, not multiplied by the factors.
        """
        self._begin(actions, loss_factors, microbatches)
        began, waited = time.perf_counter(), self.p2p.waited
        with self.passes.weights_unchanged():
            for position, action in enumerate(actions):
                # Parameters whose gradient this action completes.
                completed = self._completed_at.get(position, ())
                if completed:
                    self.gradients.last_microbatch(completed)
                with annotated(action):
                    self._execute(action)
                if self._ends_backward(action):
                    self.gradients.microbatch_done(self._parameters[action.stage])
                if completed:
                    self.gradients.backward_done(completed)
        self.p2p.flush()
        self.idle = (self.p2p.waited - waited) / (time.perf_counter() - began)
        return self._sums

    def _execute(self, action: Action) -> None:
        match action.kind:
            case "F":
                self._forward(action)
            case "B":
                self._backward(action)
            case "W":
                self.passes.compute_weight_gradients(self._deferred.pop((action.stage, action.microbatch)))

    def _begin(
        self,
        actions: Sequence[Action],
        loss_factors: Mapping[str, torch.Tensor],
        microbatches: Sequence[Batch],
    ) -> None:
        self.p2p.begin(len(microbatches))
        self._microbatches, self._loss_factors = microbatches, loss_factors
        self._pending: dict[tuple[int, int], PendingForward] = {}
        self._sums: Losses = {}
        self._split = {(a.stage, a.microbatch) for a in actions if a.kind == "W"}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._completed_at = self._find_completed(actions)

    def _ends_backward(self, action: Action) -> bool:
        """Return whether ``action`` is the last of a microbatch in a stage with gradients: B, or its W."""
        split = (action.stage, action.microbatch) in self._split
        return action.kind == ("W" if split else "B")

    def _find_completed(self, actions: Sequence[Action]) -> dict[int, list[nn.Parameter]]:
        """Map the position of a stage's last action to the parameters whose gradients are final after it.

        A parameter shared by two stages of this rank is complete with the later of them.
        """
        last = {action.stage: position for position, action in enumerate(actions) if action.kind != "F"}
        last_of = {
            parameter: last[stage]
            for stage in sorted(self.stages, key=last.__getitem__)
            for parameter in self.stages[stage].parameters()
        }
        completed: dict[int, list[nn.Parameter]] = {position: [] for position in last.values()}
        for parameter, position in last_of.items():
            completed[position].append(parameter)
        return completed

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        batch = self._microbatches[number]
        inputs = self._inputs(stage, number, batch)
        if stage:
            inputs.requires_grad_()
        output = self._run_stage(stage, inputs, batch)
        self._pending[stage, number] = PendingForward(inputs, output)
        add_losses(output.losses, self._sums)
        if stage != self.final:
            self.p2p.send("forward", stage, number, output.value.detach(), tuple(batch.tokens.shape))

    def _run_stage(self, stage: int, inputs: torch.Tensor, batch: Batch) -> Any:
        """Run a stage forward and return its :class:`PartOutput`, with a value for the next stage.

        Raises:
            PluginError: the model's part returned something else.
        """
        output = self.stages[stage](inputs, batch)
        last = stage == self.final
        if problem := problem_of(output, needs_value=not last, needs_loss=last and batch.targets is not None):
            raise PluginError(f"the model's part for stage {stage} returned {problem}")
        return output

    def _inputs(self, stage: int, number: int, batch: Batch) -> torch.Tensor:
        if stage == 0:
            return batch.tokens
        return self.p2p.receive(stage - 1, number, tuple(batch.tokens.shape))

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        done = self._pending.pop((stage, number))
        roots = with_gradients(*self._roots_and_gradients(stage, number, done.output))
        if not roots and not self.final:
            raise NanotrainError("no parameter that the loss depends on is trained; expected one at least")
        deferred = None
        if (stage, number) in self._split:
            deferred = self._deferred[stage, number] = DeferredGradients()
        with self.passes.backward(deferred):
            if roots:  # all parameters of the first stage may be frozen
                torch.autograd.backward([*roots], [*roots.values()])
        if stage:
            assert done.inputs.grad is not None
            shape = tuple(self._microbatches[number].tokens.shape)
            self.p2p.send("backward", stage - 1, number, done.inputs.grad, shape)

    def _roots_and_gradients(
        self, stage: int, number: int, output: PartOutput
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the tensors from which a stage's backward pass starts, and their gradients; None means 1.

        They are the training loss and, except in the last stage, the output, whose gradient the next stage
        sends.
        """
        losses = self._training_loss(output.losses)
        if stage == self.final:
            return losses, [None] * len(losses)
        assert output.value is not None
        received = self.p2p.receive_gradient(stage, number, output.value)
        return [output.value, *losses], [received, *[None] * len(losses)]

    def _training_loss(self, losses: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum of loss terms times their factors, a scalar; nothing for a stage without losses.

        Raises:
            PluginError: a term has no weight in the model's ``loss_weights``.
        """
        if not losses:
            return []
        if unknown := losses.keys() - self._loss_factors.keys():
            known = ", ".join(self._loss_factors)
            near = did_you_mean(min(unknown), [*self._loss_factors])
            raise PluginError(
                f"the model returned the loss '{min(unknown)}'; its loss_weights have {known}{near}"
            )
        return [torch.stack([self._loss_factors[name] * value for name, value in losses.items()]).sum()]

    # --- for its values alone -----------------------------------------------------------------

    def compute(self, batch: Batch, loss_factors: Mapping[str, torch.Tensor]) -> Iterator[Computed]:
        """Run a microbatch forward and backward, and yield all that this rank's stages receive and compute.

        No gradient is accumulated or reduced over data ranks. Collective over the pipeline: all ranks must
        exhaust it, outside of :meth:`run`. It holds the gradients of one stage at a time.
        """
        self.p2p.begin(1)
        self._loss_factors = loss_factors
        shape, done = tuple(batch.tokens.shape), {}
        with self.passes.weights_unchanged(), self.passes.uncounted():
            for stage in sorted(self.stages):
                inputs = self._inputs(stage, 0, batch)
                if stage:
                    yield Computed(stage, "input", inputs, received=True)
                    inputs.requires_grad_()
                output = self._run_stage(stage, inputs, batch)
                done[stage] = PendingForward(inputs, output)
                yield from (Computed(stage, f"loss {n}", loss.detach()) for n, loss in output.losses.items())
                if stage != self.final:
                    yield Computed(stage, "output", output.value.detach())
                    self.p2p.send("forward", stage, 0, output.value.detach(), shape)
            for stage in sorted(self.stages, reverse=True):
                yield from self._compute_gradients(stage, done.pop(stage), shape)
        self.p2p.flush()

    def _compute_gradients(self, stage: int, done: PendingForward, shape: Shape) -> Iterator[Computed]:
        roots, gradients = self._roots_and_gradients(stage, 0, done.output)
        if stage != self.final:
            assert gradients[0] is not None
            yield Computed(stage, "gradient of the output", gradients[0], backward=True, received=True)
        wanted: dict[str, torch.Tensor] = {"the input": done.inputs} if stage else {}
        wanted |= {n: p for n, p in self.stages[stage].named_parameters() if p.requires_grad}
        differentiable = with_gradients(roots, gradients)
        if not differentiable:  # all parameters of the first stage are frozen
            return
        with self.passes.backward():
            found = torch.autograd.grad(
                [*differentiable], [*wanted.values()], [*differentiable.values()], allow_unused=True
            )
        for name, gradient in reversed([*zip(wanted, found, strict=True)]):  # as backward reaches them
            if gradient is not None:
                yield Computed(stage, f"gradient of {name}", gradient, backward=True)
        if stage:
            self.p2p.send("backward", stage - 1, 0, found[0], shape)

    # --- without gradients --------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch) -> Losses:
        """Return this rank's loss sums of one validation batch. Collective over the pipeline."""
        sums: Losses = {}
        for output in self.through(batch).values():
            add_losses(output.losses, sums)
        return sums

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, document_starts: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [B, S, V] for tokens [B, S] on every rank. Collective over the pipeline.

        ``document_starts`` [B, S] masks documents from one another: see :attr:`Batch.document_starts`.
        """
        outputs = self.through(Batch(tokens, document_starts=document_starts))
        if len(set(self.owners)) == 1:
            alone = outputs[self.final].value
            assert alone is not None
            return alone
        # Every rank must know the shape to receive into: only the last stage knows the vocabulary.
        mine = outputs[self.final].value if self.final in outputs else None
        shapes = self.mesh.gather(None if mine is None else (tuple(mine.shape), mine.dtype), "pp")
        shape, dtype = shapes[self.owners[self.final]]
        logits = (
            torch.empty(shape, dtype=dtype, device=self.mesh.device) if mine is None else mine.contiguous()
        )
        source = self.mesh.ranks("pp")[self.owners[self.final]]
        with self.mesh.waits.collectives:
            dist.broadcast(logits, source, group=self.mesh.group("pp"))
        return logits

    @torch.no_grad()
    def through(self, batch: Batch) -> dict[int, PartOutput]:
        """Run this rank's stages forward, in model order and in evaluation mode.

        Collective over the pipeline. The cache of ``batch`` is not advanced. Returns outputs by stage.
        """
        self.p2p.begin(1)
        outputs = {}
        for stage in sorted(self.stages):
            with self.passes.weights_unchanged(), self.passes.uncounted(), evaluating(self.stages[stage]):
                outputs[stage] = self._run_stage(stage, self._inputs(stage, 0, batch), batch)
            if stage != self.final:
                self.p2p.send("forward", stage, 0, outputs[stage].value, tuple(batch.tokens.shape))
        self.p2p.flush()
        return outputs


def problem_of(output: Any, *, needs_value: bool, needs_loss: bool) -> str:
    """Return what is wrong with the output of a model's part, and what was expected; empty if nothing is.

    Args:
        output: what the part returned.
        needs_value: whether a next stage waits for hidden states.
        needs_loss: whether the part has the head, and the batch targets.
    """
    if not isinstance(output, PartOutput):
        return f"a {type(output).__name__}; expected PartOutput(value, losses)"
    if needs_value and not isinstance(output.value, torch.Tensor):
        return "no value; expected the hidden states for the next stage"
    if not isinstance(output.losses, Mapping):
        return f"losses that are a {type(output.losses).__name__}; expected a dict of each by its name"
    for name, loss in output.losses.items():
        if not isinstance(loss, torch.Tensor):
            return f"a {type(loss).__name__} for the loss '{name}'; expected a tensor"
        if loss.numel() != 1:
            return f"several numbers for the loss '{name}'; expected one, their sum"
    if needs_loss and not output.losses:
        return "no loss; expected sums by name, such as that of next-token losses, 'lm'"
    return ""


def with_gradients(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> dict[torch.Tensor, torch.Tensor | None]:
    """Map the roots that depend on anything trained to their gradients: autograd refuses others."""
    return {root: gradient for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad}


def add_losses(losses: Mapping[str, torch.Tensor], sums: Losses) -> None:
    """Add one pass's losses to the sums, in place and detached."""
    for name, value in losses.items():
        sums[name] = sums[name] + value.detach() if name in sums else value.detach()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and restore every submodule's mode afterwards."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
