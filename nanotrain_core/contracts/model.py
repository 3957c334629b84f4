"""The interface of a model and of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.errors import PluginError
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.pipeline.actions import Costs, Part


@attrs.define(frozen=True, eq=False)
class PartOutput:
    """The output of one part of a model for one microbatch."""

    value: torch.Tensor | None
    """Hidden states [B, S, D] for the next part. From the last part: logits [B, S, V] when the
    batch has no targets, else None."""
    losses: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """Scalar *sums* of loss terms, by name. The engine divides each by its global count."""


@attrs.define(frozen=True)
class Initializer:
    """How a parameter is initialized. ``normal`` has mean 0 and standard deviation ``value``, ``uniform`` is
    between -``value`` and ``value``."""

    kind: Literal["normal", "uniform", "constant"]
    value: float

    def __attrs_post_init__(self) -> None:
        """Reject what would be drawn as something else.

        Raises:
            PluginError: the kind is another, or the value is no such number.
        """
        number = isinstance(self.value, int | float) and isfinite(self.value)
        if (
            self.kind not in ("normal", "uniform", "constant")
            or not number
            or (self.kind != "constant" and self.value < 0)
        ):
            raise PluginError(
                f"Initializer({self.kind!r}, {self.value!r}): expected 'normal' with a standard deviation of "
                "at least 0, 'uniform' with a bound of at least 0, or 'constant' with a finite number"
            )


class ModelPart(nn.Module):
    """A base class: a module built on ``meta``, with parameters under their global names and tagged roles.

    Another ``nn.Module`` with :meth:`initializer` and, if it has buffers, :meth:`constant` is accepted too.
    """

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """``inputs`` is tokens [B, S] for the part with the embedding, otherwise hidden states [B, S, D]."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(inputs, batch)")

    def initializer(self, name: str) -> Initializer:
        """Return how the parameter with that global name is initialized.

        Raises:
            KeyError: there is no such parameter: by default, none is known.
        """
        raise KeyError(name)

    def constant(self, name: str) -> torch.Tensor:
        """Return the values of the whole model's buffer of that global name: by default there is none.

        Each rank keeps the block given by its placement. Buffers never change during training, and
        checkpoints omit them; those of a ``CountingRouter`` may, in ``balance``, and are saved.
        """
        raise uninitialized(name)


def uninitialized(buffer: str) -> PluginError:
    """Return the error of a buffer built on ``meta`` whose values nobody gives."""
    return PluginError(
        f"model buffer {buffer} would be uninitialized: give the part a method constant(name), which "
        "returns the whole model's tensor of that name, or compute it in forward; what training changes "
        "is a parameter with requires_grad=False"
    )


class Model(Protocol):
    """A model's dimensions and its parts. Independent of parallelism."""

    layers: int
    """Number of layers among which :meth:`build` can split the model: those of ``Costs.layers``. Modules
    after the head, such as MTP, are not counted."""
    vocab_size: int
    """Number of different tokens that it has an embedding of."""
    max_length: int | None
    """Longest sequence in tokens; None if any length works."""
    loss_weights: Mapping[str, float]
    """Weight of each loss term in the training loss, at least one. ``"lm"`` is the next-token loss, which
    evaluation reports. A model that computes none, such as a reward model, has no such term: evaluation
    reports the weighted sum of its terms."""

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return a :class:`ModelPart`. Parameters need no values: they are initialized by name.

        Args:
            part: which layers to build.
            ops: the functions that modules of the part call for attention, norms and so on. A model that uses
                none of them ignores the argument; the model must not depend on which implementation they are.
        """
        ...

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return, for each name in :attr:`loss_weights`, the count over which that term is averaged in
        ``batch``.

        A count is a scalar tensor of any integer or float dtype on the batch's device; that of ``lm`` is the
        number of target tokens. Counts are summed over all microbatches and data ranks in float64. The engine
        multiplies each loss sum by its weight over that total, at least 1, before backward. It raises a
        PluginError if the count of a name in :attr:`loss_weights` is missing.
        """
        ...

    def flops(self, length: int) -> Costs:
        """Return forward and backward model FLOPs for one token of a sequence of ``length``.

        They are those of the embedding, of each layer and of the head, by which pipeline stages are balanced.
        """
        ...


@runtime_checkable
class ChangesInRun(Protocol):
    """Optional interface of a model with config fields marked with ``CHANGEABLE``: phases change them."""

    def change(self, config: Any, parts: Iterable[nn.Module]) -> None:
        """Train from the next step on as a model built from ``config``.

        :attr:`Model.loss_weights` are then those of ``config``, for the same terms.

        Args:
            config: differs from the current one only in such fields.
            parts: the model's parts on this rank, as wrappers and precision left them.
        """
        ...


@runtime_checkable
class CachesContext(Protocol):
    """Optional interface of a model whose parts continue from the tokens before those of a batch (KV cache).

    Where ``batch.cache`` is not None, the tokens [B, S] of the batch follow ``batch.start`` others: positions
    begin there. Each layer that attends to earlier tokens stores what it needs with
    ``batch.cache_of(layer).extend(...)`` and continues from what that returns. A model without this interface
    also generates text, recomputing the whole text for each token.
    """

    caches: bool
    """False where the model's config makes caching impossible."""


def caches_context(model: Model) -> bool:
    """Return whether parts of ``model`` continue from ``batch.cache``."""
    return isinstance(model, CachesContext) and model.caches
