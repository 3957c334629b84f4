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
    """The cached tensors of one layer, which grow along the sequence, up to its window if it has one."""

    def __init__(self, limit: int) -> None:
        self.limit, self.length = limit, 0
        self.kept: tuple[torch.Tensor, ...] = ()
        """Each [B, room, ...], of whose first ``written`` tokens the last are those of the text."""
        self.written = 0

    def extend(self, *new: torch.Tensor, window: int | None = None) -> tuple[torch.Tensor, ...]:
        """Append tensors [B, S, ...] of this pass's tokens; return each with all earlier ones [B, T, ...].

        With a ``window``, in which a token sees itself and ``window`` - 1 before it, returned are only as
        many earlier ones: the first of these S tokens sees no others. Twice as many are kept at most.

        Raises:
            ValueError: there are more tokens than the cache has room for.
        """
        size = new[0].shape[1]
        self.length += size
        if self.length > self.limit:
            raise ValueError(f"a cache for {self.limit} tokens was given {self.length}")
        before = self.written if window is None else min(self.written, window - 1)
        if not self.kept or self.written + size > self.kept[0].shape[1]:
            self._move(before, size, new, window)
        begin, end = self.written, self.written + size
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, begin:end] = x
        self.written = end
        return tuple(kept[:, begin - before : end] for kept in self.kept)

    def _move(self, before: int, size: int, new: tuple[torch.Tensor, ...], window: int | None) -> None:
        """Move the last ``before`` tokens to the front, of new storage if ``size`` more would not fit."""
        room = self.limit if window is None else min(self.limit, before + max(size, window))
        old = [x[:, self.written - before : self.written].clone() for x in self.kept]
        if not self.kept or before + size > self.kept[0].shape[1]:
            self.kept = tuple(x.new_empty(x.shape[0], room, *x.shape[2:]) for x in new)
        for kept, x in zip(self.kept, old, strict=False):
            kept[:, :before] = x
        self.written = before


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
