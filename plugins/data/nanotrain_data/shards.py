"""The data component ``shards``: prepared folders, memory-mapped, blended and shuffled without a table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanotrain_core.api.torch import Batch, SequenceData, Shard
from nanotrain_data.blend import Blend, whole_weights
from nanotrain_data.codecs import Codec, codec_of
from nanotrain_data.config import ShardsConfig
from nanotrain_data.corpus import Corpus, OpenShards
from nanotrain_data.manifest import read_manifest
from nanotrain_data.order import BlendedOrder, HeldOutOrder
from nanotrain_data.pieces import check_alike, pieces_of, source_names

Integers = npt.NDArray[np.int64]


class Shards(SequenceData):
    """Each source's documents end to end, cut into sequences; the blend draws from the sources by weights.

    Sequence i of a source reads its tokens i * length up to (i + 1) * length and predicts each one's
    successor. Where phases change the length, pieces of the longest one are held out, or trained on, as a
    whole, and each is cut into as many whole sequences as it has: as ``text`` does.

    A position is the number of sequences that the blend has handed out. Which source the next one comes from,
    how many that source has had, and so its epoch and place in it, follow from that number alone.
    """

    def __init__(self, config: ShardsConfig) -> None:
        self.config = config
        self.read_ahead = config.read_ahead
        self.names = source_names(config.paths)

    def tokenizer_alone(self) -> Codec:
        """Return the tokenizer that the first folder holds a copy of."""
        folder = Path(self.config.paths[0])
        return codec_of(folder, read_manifest(folder).tokenizer)

    def open(self, *, length: int, seed: int) -> None:
        """Read manifests, and compare sizes of files with them. No token is read.

        Raises:
            DataError: a folder is not prepared, a file of it is missing or has another size, sources have
                different tokenizers, or one has less than one sequence.
        """
        config, opened = self.config, OpenShards()
        self.corpora = [Corpus(Path(path), opened) for path in config.paths]
        manifests = [corpus.manifest for corpus in self.corpora]
        check_alike(config, manifests)
        self._expected = max(self._expected, config.piece_length)  # prepare() has the pieces as long
        self.pieces = pieces_of(config, manifests, max(self._expected, length))
        self._blend = Blend(whole_weights(config.weights or [each.split.train for each in self.pieces]))
        self.vocab_size = max(manifest.vocab_size for manifest in manifests)
        self.bytes_per_token = self._bytes_per_token()
        self.document_end = manifests[0].end_of_document if config.mask_documents else None
        self._taken = dict.fromkeys(self.names, 0)
        sources = " ".join(manifest.digest for manifest in manifests)
        shares = ":".join(map(str, self._blend.weights))
        held = "+".join(str(each.split.held) for each in self.pieces)
        of = "+".join(str(each.split.count) for each in self.pieces)
        self.prepare(
            length=length,
            seed=seed,
            **self._counts(length),
            fingerprint=f"shards {hashlib.sha256(sources.encode()).hexdigest()[:16]}, blended {shares}, "
            f"{held} of {of} sequences held out",
        )

    def set_length(self, length: int) -> None:
        """Cut each piece into sequences of ``length`` tokens."""
        self.prepare_length(length, **self._counts(length))

    def _counts(self, length: int) -> dict[str, int]:
        train, held = (self._of_sources(length, validation=validation) for validation in (False, True))
        return {"train": sum(train), "validation": sum(held)}

    def _of_sources(self, length: int, *, validation: bool) -> list[int]:
        """Return how many sequences of that length a split has of each source, [sources]."""
        return [each.sequences(length, validation=validation) for each in self.pieces]

    def order(self, seed: int, *, validation: bool) -> BlendedOrder | HeldOutOrder:
        """Return an order that takes no memory."""
        if validation:
            return HeldOutOrder(self.validation, seed)
        return BlendedOrder(self._blend, self._of_sources(self.length, validation=False), seed)

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the tokens of those sequences of a split, [n, length + 1].

        Raises:
            DataError: a shard is damaged there, by its name.
        """
        found = np.empty((len(numbers), self.length + 1), np.int64)
        each = self.longest // self.length
        firsts = np.cumsum([0, *self._of_sources(self.length, validation=validation)])[:-1]
        sources = np.searchsorted(firsts, numbers, side="right") - 1
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            pieces, within = np.divmod(numbers[rows] - firsts[source], each)
            begins = self.pieces[source].split.pieces(pieces, validation=validation) * self.longest
            found[rows] = self.corpora[source].read(begins + within * self.length, self.length + 1)
        return found

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

    def _bytes_per_token(self) -> float | None:
        """Return bytes of text per token of all of each source, by what is held out of it.

        Of the whole source, as the manifest knows it: to decode what is held out would take seconds.
        """
        manifests = [corpus.manifest for corpus in self.corpora]
        if not all(manifest.bytes for manifest in manifests):
            return None
        held = [each.split.held or each.split.train for each in self.pieces]
        each = [manifest.bytes / manifest.tokens for manifest in manifests]
        return sum(count * size for count, size in zip(held, each, strict=True)) / sum(held)

    def describe(self) -> str:
        """Return what was opened, in one line."""
        manifests = [corpus.manifest for corpus in self.corpora]
        documents, tokens = (sum(getattr(m, what) for m in manifests) for what in ("documents", "tokens"))
        sources = f"{len(manifests)} sources, " if len(manifests) > 1 else ""
        return (
            f"shards: {sources}{documents} documents, {tokens} tokens ({manifests[0].tokenizer.name}), "
            f"{self.train} sequences to train on, {self.validation} held out"
        )

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
