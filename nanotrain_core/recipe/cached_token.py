"""What generation keeps of each token, as a model's config alone says it: for reports, without torch.

A config class may offer it::

    def cached_token(self):
        return CachedToken(elements=2 * self.layers * self.heads * self.head_size, flops=...)
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(frozen=True, kw_only=True)
class CachedToken:
    """What one token takes in a model's cache, all layers together."""

    elements: int
    """Numbers that are kept: keys and values; of latent attention the latent and the rotary key."""
    flops: float
    """That a new token costs for it: scores and values, 2 for each multiplication and addition."""


def cached_token_of(config: Any) -> CachedToken | None:
    """Return what ``cached_token()`` of a model's config says; None if it has none."""
    tell = getattr(config, "cached_token", None)
    found: CachedToken | None = tell() if callable(tell) else None
    return found
