"""The KV-cache size and FLOPs of one token, from a model's config alone: for reports, without torch.

A config class may define::

    def cached_token(self):
        return CachedToken(elements=2 * self.layers * self.heads * self.head_size, flops=...)
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(frozen=True, kw_only=True)
class CachedToken:
    """The cost of one cached token, over all layers."""

    elements: int
    """Cached elements: keys and values; for latent attention the latent and the rotary key."""
    flops: float
    """FLOPs for a new token to attend to it: scores and values, 2 for each multiply-add."""


def cached_token_of(config: Any) -> CachedToken | None:
    """Return the result of ``cached_token()`` of a model's config; None if it has none."""
    tell = getattr(config, "cached_token", None)
    found: CachedToken | None = tell() if callable(tell) else None
    return found
