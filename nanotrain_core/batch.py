"""The data a step trains on, and the share of it that one rank sees."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from nanotrain_core.models.cache import Cache, LayerCache

#: A target with this value is not predicted and not counted.
IGNORE = -100


@attrs.define(frozen=True, eq=False)
class Batch:
    """Token sequences and what to predict at each position, both int64 [B, S]."""

    tokens: torch.Tensor
    targets: torch.Tensor | None = None
    """The next token at each position, or :data:`IGNORE`. None asks the model for logits."""
    cache: Cache | None = None
    """What the model's layers kept of the tokens before these, while text is generated: these tokens follow
    :attr:`start` others. None: they are whole sequences."""

    @property
    def start(self) -> int:
        """The position of the first token."""
        return 0 if self.cache is None else self.cache.start

    def cache_of(self, layer: str) -> LayerCache | None:
        """Return what that layer kept of the tokens before; None where there is no cache, as in training."""
        return None if self.cache is None else self.cache.layer(layer)

    @property
    def sequences(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Batch:
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.tokens.to(**move),  # type: ignore[call-overload]
            None if self.targets is None else self.targets.to(**move),  # type: ignore[call-overload]
        )

    def pinned(self) -> Batch:
        """Return it in memory that a GPU copies from while the host goes on."""
        targets = self.targets
        return Batch(self.tokens.pin_memory(), None if targets is None else targets.pin_memory())

    def split(self, size: int, count: int | None = None) -> Iterator[Batch]:
        """Yield consecutive microbatches of ``size`` sequences; the last may be smaller.

        ``count``: exactly so many, no more than sequences, so that the last ones may be smaller.
        """
        count, end = -(-self.sequences // size) if count is None else count, 0
        for to_come in reversed(range(count)):
            start, end = end, min(end + size, self.sequences - to_come)
            rows = slice(start, end)
            yield Batch(self.tokens[rows], None if self.targets is None else self.targets[rows])

    def target_tokens(self) -> torch.Tensor:
        """Return how many positions are predicted, a scalar on the batch's device."""
        if self.targets is None:
            raise ValueError("a batch without targets has nothing to count")
        return (self.targets != IGNORE).sum()


@attrs.define(frozen=True)
class Shard:
    """Which consecutive rows of every global batch belong to this rank: the ``index``-th of ``count``."""

    index: int = 0
    count: int = 1

    def rows(self, sequences: int) -> range:
        """Return this shard's rows of a global batch of ``sequences``: as many as another's, or one more."""
        return range(sequences * self.index // self.count, sequences * (self.index + 1) // self.count)
