"""Runs one step of a schedule on this rank: a list of actions over stages and microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from nanotrain_core.actions import Action
from nanotrain_core.batch import Batch
from nanotrain_core.contracts import GradientSync, PartOutput

Losses = dict[str, torch.Tensor]


class Executor:
    """Executes forward and backward actions on the stages of this rank.

    The schedule with one stage is complete here; a pipeline adds the hand-over between stages.
    """

    def __init__(self, stages: Mapping[int, nn.Module], gradients: GradientSync) -> None:
        self.stages = stages
        self.gradients = gradients

    def run(
        self, actions: Sequence[Action], microbatches: Sequence[Batch], weights: Mapping[str, torch.Tensor]
    ) -> Losses:
        """Run ``actions`` and return the detached sum of each loss term over the microbatches.

        Args:
            actions: this rank's list.
            microbatches: this rank's share of the global batch, by microbatch number.
            weights: what each loss sum is multiplied by before backward: its weight in the training
                loss times the loss scale, over its global count.
        """
        outputs: dict[tuple[int, int], PartOutput] = {}
        sums: Losses = defaultdict(lambda: torch.zeros((), device=microbatches[0].tokens.device))
        last_backward = max(i for i, action in enumerate(actions) if action.kind != "F")
        for position, action in enumerate(actions):
            key = (action.stage, action.microbatch)
            if action.kind == "F":
                batch = microbatches[action.microbatch]
                outputs[key] = self.stages[action.stage](batch.tokens, batch)
                for name, value in outputs[key].losses.items():
                    sums[name] = sums[name] + value.detach()
            elif action.kind == "B":
                if position == last_backward:
                    self.gradients.last_microbatch()
                losses = outputs.pop(key).losses
                torch.stack([weights[name] * value for name, value in losses.items()]).sum().backward()  # type: ignore[no-untyped-call]
            else:
                raise ValueError(f"action {action} needs a pipeline executor")
        return dict(sums)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss sums of one validation batch."""
        (stage,) = self.stages.values()
        with evaluating(stage):
            return dict(stage(batch.tokens, batch).losses)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode and every one of its submodules back into the mode it had."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
