"""What the layers of a model keep of a text so far, so that a further token costs the work of one token.

A batch brings it along while text is generated; in training there is none. Nothing here knows of attention:
a layer keeps whatever tensors it goes on from, keys and values or a latent that they are made of. Storage is
made of the first tensors that a layer keeps, so each rank holds what its own heads need.

Shapes: B batch, S tokens of this pass, T tokens so far, those of this pass included.

Sources: Pope et al., arXiv 2211.05102, section 2.1 (KV cache; prefill and decode).
"""

from __future__ import annotations

import torch


class LayerCache:
    """What one layer keeps: tensors that grow along the sequence."""

    def __init__(self, limit: int) -> None:
        self.limit, self.length = limit, 0
        self.kept: tuple[torch.Tensor, ...] = ()
        """Each [B, limit, ...], of which the first ``length`` tokens are written."""

    def extend(self, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keep tensors [B, S, ...] of the tokens of this pass; return each with all before it [B, T, ...].

        Raises:
            ValueError: there are more tokens than the cache was made for.
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
    """What the layers of this rank keep of a batch of texts of one length."""

    def __init__(self, limit: int) -> None:
        """Make an empty one for texts of at most ``limit`` tokens."""
        self.limit, self.start = limit, 0
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """Return what a layer keeps. ``name``: any that no other layer of the model has."""
        return self._layers.setdefault(name, LayerCache(self.limit))

    def advance(self, tokens: int) -> None:
        """Count so many more tokens as seen, once all parts of the model on this rank have seen them."""
        self.start += tokens

    @property
    def bytes_per_token(self) -> int:
        """What a token of one text takes on this rank, over all of its layers."""
        kept = (x for layer in self._layers.values() for x in layer.kept)
        return sum(x[0, 0].numel() * x.itemsize for x in kept)
