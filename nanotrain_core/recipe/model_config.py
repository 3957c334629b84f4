"""The base class of a model's table: what its config alone says of the model, for checks without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from nanotrain_core.recipe.divisibility import Divisible


@attrs.define(frozen=True, kw_only=True)
class CachedToken:
    """The cost of one cached token, over all layers."""

    elements: int
    """Cached elements: keys and values; for latent attention the latent and the rotary key."""
    flops: float
    """FLOPs for a new token to attend to it: scores and values, 2 for each multiply-add."""
    window: int = 0
    """Cached tokens that a new one attends to in layers with sliding-window attention: others are dropped."""
    sliding: float = 0.0
    """Share of such layers in elements and FLOPs."""

    def attended(self, length: int) -> float:
        """Return to how many of ``length`` cached tokens a new one attends, on average over layers."""
        return length - self.sliding * max(0, length - self.window)


class ModelConfig:
    """A base class: the table of a model. It has no keys of its own; a model overrides what it can tell.

    The defaults are true of any model: without the others, checks of recipes leave out what depends on them.
    """

    layers: int | None = None
    """Number of layers, usually a key. None: known only to the built model, so that the stages of a pipeline
    are not checked before ranks start."""

    def divisibility(self) -> Iterable[Divisible] | None:
        """Return how finely parts can be sharded: what each degree must divide. None: not known.

        Checks of wrappers and optimizers, which refer to roles and not to models, read it with
        :func:`~nanotrain_core.recipe.divisibility.divisibility_of`::

            yield Divisible((Role.COLUMN, Role.ROW), "model.heads", self.heads, "heads")
        """
        return None

    def cached_token(self) -> CachedToken | None:
        """Return what generation caches per token, for reports. None: not known."""
        return None

    def canonical(self) -> dict[str, Any]:
        """Return the keys that define what given weights compute: equal for tables of the same model.

        An unset value is replaced by the one that it implies, and a key that nothing reads is left out. By
        default every key counts, as it is.
        """
        return attrs.asdict(self)  # type: ignore[arg-type]


def cached_token_of(config: ModelConfig) -> CachedToken | None:
    """Return the result of ``cached_token()`` of a model's config."""
    return config.cached_token()
