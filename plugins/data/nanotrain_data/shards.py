"""The data component ``shards``: prepared folders, memory-mapped, blended and shuffled without a table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nanotrain_data.blend import Blend, whole_weights
from nanotrain_data.blended import BlendedData
from nanotrain_data.config import ShardsConfig, StreamingConfig
from nanotrain_data.corpus import Corpus, OpenShards
from nanotrain_data.pieces import check_alike, pieces_of

Integers = npt.NDArray[np.int64]


class Shards(BlendedData):
    """Each source's documents end to end, cut into sequences; the blend draws from the sources by weights.

    Sequence i of a source reads its tokens i * length up to (i + 1) * length and predicts each one's
    successor. Where phases change the length, pieces of the longest one are held out, or trained on, as a
    whole, and each is cut into as many whole sequences as it has: as ``text`` does.
    """

    name = "shards"

    def __init__(self, config: ShardsConfig | StreamingConfig) -> None:
        super().__init__(config)
        self.config = config
        self.shuffle_tokens = config.shuffle_tokens

    def open_corpora(self) -> Sequence[Corpus]:
        """Return the sources."""
        opened = OpenShards()
        return [Corpus(Path(path), opened) for path in self.config.paths]

    def open(self, *, length: int, seed: int) -> None:
        """Read manifests, and compare sizes of files with them. No token is read.

        Raises:
            DataError: a folder is not prepared, a file of it is missing or has another size, sources have
                different tokenizers, or one has less than one sequence.
        """
        config = self.config
        self.corpora = self.open_corpora()
        manifests = [corpus.manifest for corpus in self.corpora]
        check_alike(config, manifests)
        self._expected = max(self._expected, config.piece_length)  # prepare() has the pieces as long
        self.pieces = pieces_of(config, manifests, max(self._expected, length))
        self._blend = Blend(whole_weights(config.weights or [each.split.train for each in self.pieces]))
        self.vocab_size = max(manifest.vocab_size for manifest in manifests)
        self.bytes_per_token = self._bytes_per_token()
        self.document_end = manifests[0].end_of_document if config.mask_documents else None
        sources = " ".join(manifest.digest for manifest in manifests)
        shares = ":".join(map(str, self._blend.weights))
        held = "+".join(str(each.split.held) for each in self.pieces)
        of = "+".join(str(each.split.count) for each in self.pieces)
        stretches = f", shuffled by {config.shuffle_tokens}" if config.shuffle_tokens else ""
        self.prepare(
            length=length,
            seed=seed,
            **self.counts(length),
            fingerprint=f"shards {hashlib.sha256(sources.encode()).hexdigest()[:16]}, blended {shares}, "
            f"{held} of {of} sequences held out" + stretches,
        )

    def sequences_of_sources(self, length: int, *, validation: bool) -> list[int]:
        """Return how many sequences of that length a split has of each source, [sources]."""
        return [each.sequences(length, validation=validation) for each in self.pieces]

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the tokens of those sequences of a split, [n, length + 1].

        Raises:
            DataError: a shard is damaged there, by its name.
        """
        found = np.empty((len(numbers), self.length + 1), np.int64)
        for source, rows, begins in self.places(numbers, validation=validation):
            found[rows] = self.corpora[source].read(begins, self.length + 1)
        return found

    def places(self, numbers: Integers, *, validation: bool) -> Iterator[tuple[int, Integers, Integers]]:
        """Yield the sources of sequences of a split, which of them are of it, and where each begins in it."""
        each = self.longest // self.length
        firsts = np.cumsum([0, *self.sequences_of_sources(self.length, validation=validation)])[:-1]
        sources = np.searchsorted(firsts, numbers, side="right") - 1
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            pieces, within = np.divmod(numbers[rows] - firsts[source], each)
            begins = self.pieces[source].split.pieces(pieces, validation=validation) * self.longest
            yield source, rows, begins + within * self.length

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
            f"{self.name}: {sources}{documents} documents, {tokens} tokens ({manifests[0].tokenizer.name}), "
            f"{self.train} sequences to train on, {self.validation} held out"
        )
