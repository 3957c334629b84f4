"""What a model must offer, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import attrs
import torch
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.models.ops import TORCH, Ops
from nanotrain_core.pipeline.actions import Costs, Part


@attrs.define(frozen=True, eq=False)
class PartOutput:
    """What one part of a model computes from one microbatch."""

    value: torch.Tensor | None
    """Hidden states [B, S, D] for the next part. From the last part: logits [B, S, V] when the
    batch has no targets, else None."""
    losses: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """Scalar *sums* of loss terms, by name. The engine divides each by its global count."""


@attrs.define(frozen=True)
class Initializer:
    """How a parameter starts. ``normal`` has mean 0 and standard deviation ``value``."""

    kind: Literal["normal", "constant"]
    value: float


class ModelPart(Protocol):
    """An ``nn.Module`` built on ``meta``, parameters under their global names, roles tagged."""

    def __call__(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """``inputs`` is tokens [B, S] for the part with the embedding, else hidden states [B, S, D]."""
        ...

    def initializer(self, name: str) -> Initializer:
        """Return how the parameter of that global name starts."""
        ...


class Model(Protocol):
    """A model's dimensions and its parts. Knows nothing of parallelism."""

    layers: int
    vocab_size: int
    max_length: int | None
    """Longest sequence, None if any length works."""
    loss_weights: Mapping[str, float]
    """Weight of each loss term in the training loss. ``"lm"`` is the next-token loss."""

    def build(self, part: Part, ops: Ops = TORCH) -> nn.Module:
        """Return a :class:`ModelPart`. Parameters need no values: they are initialised by name.

        Args:
            part: which layers.
            ops: the functions that modules of the part call for attention, norms and so on. Whoever has a
                use for none of them leaves them out; what they compute is never the model's business.
        """
        ...

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return what each loss term is averaged over in ``batch`` (``lm``: its target tokens).

        Counts are summed over all microbatches of all ranks, then divide the sums before backward.
        """
        ...

    def flops(self, length: int) -> Costs:
        """Return model FLOPs of forward and backward for one token of a sequence of ``length``, by piece.

        Pipelines are balanced by them.
        """
        ...
