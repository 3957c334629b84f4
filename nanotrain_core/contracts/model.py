"""What a model must offer, and its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

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

    # One with buffers has ``constant(name) -> torch.Tensor`` too: the numbers of the whole model's buffer of
    # that global name, of which each rank keeps the block that its placement says. Buffers never change in
    # training, and checkpoints leave them out.


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


@runtime_checkable
class ChangesInRun(Protocol):
    """What a model offers beside, if fields of its config are marked with ``CHANGES``: phases change them."""

    def change(self, config: Any, parts: Iterable[nn.Module]) -> None:
        """Train from the next step on as a model that was built from ``config``.

        :attr:`Model.loss_weights` are then its own, of the same terms.

        Args:
            config: differs from the one in force in such fields alone.
            parts: of the model, on this rank, as wrappers and precision left them.
        """
        ...


@runtime_checkable
class CachesContext(Protocol):
    """What a model may offer beside: its parts go on from the tokens before those of a batch.

    Where ``batch.cache`` is not None, the tokens [B, S] of the batch follow ``batch.start`` others: positions
    begin there. Each layer that looks back keeps what it needs with ``batch.cache_of(layer).extend(...)``
    and goes on from what that returns. A model without it writes text too, each token from the whole text.
    """

    caches: bool
    """False where the model's config makes that impossible."""


def caches_context(model: Model) -> bool:
    """Return whether parts of ``model`` go on from ``batch.cache``."""
    return isinstance(model, CachesContext) and model.caches
