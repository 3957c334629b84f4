"""What ``shards`` and ``chat`` share: several sources, blended, one tokenizer, and what was taken of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nanotrain_core.api.torch import Batch, SequenceData, Shard
from nanotrain_data.blend import Blend
from nanotrain_data.codecs import Codec, codec_of
from nanotrain_data.manifest import read_manifest
from nanotrain_data.order import BlendedOrder, HeldOutOrder
from nanotrain_data.pieces import source_names


class BlendedConfig(Protocol):
    """What both recipe tables have."""

    @property
    def paths(self) -> tuple[str, ...]: ...

    @property
    def read_ahead(self) -> int: ...


class BlendedData(SequenceData):
    """Sequences of several sources, drawn by weights.

    A subclass makes ``_blend`` before it calls :meth:`prepare`, and implements :meth:`sequences_of_sources`.

    A position is the number of sequences that the blend has handed out. Which source the next one comes from,
    how many that source has had, and so its epoch and place in it, follow from that number alone.
    """

    _blend: Blend
    shuffle_tokens = 0
    """Tokens of a source in a row that stay together when it is shuffled. 0: all."""

    def __init__(self, config: BlendedConfig) -> None:
        self._paths = config.paths
        self.read_ahead = config.read_ahead
        self.names = source_names(config.paths)
        self._taken = dict.fromkeys(self.names, 0)

    def sequences_of_sources(self, length: int, *, validation: bool) -> list[int]:
        """Return how many sequences of that length a split has of each source, [sources]."""
        raise NotImplementedError

    def counts(self, length: int) -> dict[str, int]:
        """Return how many sequences both splits have, as :meth:`prepare_length` takes them."""
        train, held = (self.sequences_of_sources(length, validation=split) for split in (False, True))
        return {"train": sum(train), "validation": sum(held)}

    def set_length(self, length: int) -> None:
        """Have sequences of ``length`` tokens from now on."""
        self.prepare_length(length, **self.counts(length))

    def order(self, seed: int, *, validation: bool) -> BlendedOrder | HeldOutOrder:
        """Return an order that takes no memory."""
        if validation:
            return HeldOutOrder(self.validation, seed)
        window = max(1, self.shuffle_tokens // self.length) if self.shuffle_tokens else 0
        return BlendedOrder(
            self._blend, self.sequences_of_sources(self.length, validation=False), seed, window
        )

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch, of all ranks, and return this shard's rows."""
        batch = super().train_batch(sequences, shard)
        before, after = self._blend.counts(self.position - sequences), self._blend.counts(self.position)
        for name, had, has in zip(self.names, before, after, strict=True):
            self._taken[name] += (has - had) * self.length
        return batch

    def skip(self, sequences: int) -> None:
        """Advance without reading. What is left out is not counted as taken."""
        super().skip(sequences)

    def tokens_by_source(self) -> Mapping[str, int]:
        """Return how many tokens of each source training has taken, over all ranks."""
        return dict(self._taken)

    def meta(self) -> dict[str, Any]:
        """Return the position, and what was taken of each source."""
        return {**super().meta(), "tokens_by_source": dict(self._taken)}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go back to a position.

        Raises:
            DataError: it is a position in other data.
        """
        super().load_meta(meta)
        taken = meta.get("tokens_by_source", {})
        self._taken = {name: int(taken.get(name, 0)) for name in self.names}

    def tokenizer_alone(self) -> Codec:
        """Return the tokenizer that the first folder holds a copy of."""
        folder = Path(self._paths[0])
        return codec_of(folder, read_manifest(folder))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        return self._codec().encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return self._codec().decode(tokens)

    def _codec(self) -> Codec:
        if not hasattr(self, "_known_codec"):
            self._known_codec = self.tokenizer_alone()
        return self._known_codec
