"""The KV cache of a model's layers for the text so far, so that the next token costs one token's computation.

The batch carries it during generation; in training there is none. Nothing here is specific to attention:
a layer stores whatever tensors it continues from, keys and values or a latent from which they are computed.
Storage is allocated like the first tensors that a layer stores, so each rank holds what its own heads need.

Shapes: B batch, S tokens of this pass, T tokens so far, those of this pass included.

Sources: Pope et al., arXiv 2211.05102, section 2.1 (KV cache; prefill and decode).
"""

from __future__ import annotations

import torch


class LayerCache:
    """The cached tensors of one layer, which grow along the sequence."""

    def __init__(self, limit: int) -> None:
        self.limit, self.length = limit, 0
        self.kept: tuple[torch.Tensor, ...] = ()
        """Each [B, limit, ...], of which the first ``length`` tokens are written."""

    def extend(self, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append tensors [B, S, ...] of this pass's tokens; return each with all earlier ones [B, T, ...].

        Raises:
            ValueError: there are more tokens than the cache has room for.
        """
        if not self.kept:
            self.kept = tuple(x.new_empty(x.shape[0], self.limit, *x.shape[2:]) for x in new)
        begin, end = self.length, self.length + new[0].shape[1]
        if end > self.limit:
            raise ValueError(f"a cache for {self.limit} tokens was given {end}")
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, begin:end] = x
        self.length = end
        return tuple(kept[:, :end] for kept in self.kept)


class Cache:
    """The caches of this rank's layers for a batch of texts of one length."""

    def __init__(self, limit: int) -> None:
        """Create an empty cache for texts of at most ``limit`` tokens."""
        self.limit, self.start = limit, 0
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """Return the cache of a layer. ``name``: unique among the layers of the model."""
        return self._layers.setdefault(name, LayerCache(self.limit))

    def advance(self, tokens: int) -> None:
        """Count this many more tokens as seen, after all parts of the model on this rank have seen them."""
        self.start += tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of one text on this rank, over all of its layers."""
        kept = (x for layer in self._layers.values() for x in layer.kept)
        return sum(x[0, 0].numel() * x.itemsize for x in kept)
