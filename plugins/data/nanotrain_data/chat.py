"""The data component ``chat``: conversations, of which the assistant's words alone are learned."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nanotrain_core.api import DataError
from nanotrain_core.api.torch import IGNORE, Batch
from nanotrain_data.blend import Blend, whole_weights
from nanotrain_data.blended import BlendedData
from nanotrain_data.chat_template import Message
from nanotrain_data.config import ChatConfig
from nanotrain_data.conversation_corpus import Conversations, nothing_to_learn
from nanotrain_data.conversations import Prompts, known_conversations
from nanotrain_data.corpus import Corpus, OpenShards
from nanotrain_data.manifest import read_manifest
from nanotrain_data.packs import Packs
from nanotrain_data.pieces import check_one_tokenizer

Integers = npt.NDArray[np.int64]


class Chat(BlendedData):
    """Each sequence has one conversation, or several that do not see one another, and padding behind.

    A position predicts the next token of its conversation if the assistant wrote that, and nothing else.
    Which conversations share a sequence is the same in every epoch; sequences are drawn as ``shards`` does.
    """

    def __init__(self, config: ChatConfig) -> None:
        super().__init__(config)
        self.config = config
        self._lengths: tuple[int, ...] = ()

    def expect_lengths(self, lengths: Collection[int]) -> None:
        """Keep all of them: each source must have a sequence of each."""
        super().expect_lengths(lengths)
        self._lengths = tuple(lengths)

    def open(self, *, length: int, seed: int) -> None:
        """Read manifests and tables, and pack. No token is read.

        Raises:
            DataError: a folder is not prepared, is of text, or damaged, sources have different tokenizers, or
                one has no sequence to train on of some length that the run sets.
        """
        config, opened = self.config, OpenShards()
        self.sources = [Conversations(Path(path), config) for path in config.paths]
        self.corpora = [Corpus(Path(path), opened) for path in config.paths]
        manifests = [source.manifest for source in self.sources]
        check_one_tokenizer(config.paths, manifests)
        self._packs: dict[tuple[int, bool], list[Packs]] = {}
        lengths = {length, *self._lengths}
        for each in lengths:
            self.counts(each)
        # Of the longest, as the fingerprint is: then they do not depend on the length that is set first.
        shares = config.weights or self.sequences_of_sources(max(lengths), validation=False)
        self._blend = Blend(whole_weights(shares))
        self.vocab_size = max(manifest.vocab_size for manifest in manifests)
        self.bytes_per_token = None  # of a template's words too, which are no text
        self.prepare(length=length, seed=seed, **self.counts(length), fingerprint=self._fingerprint())

    def _fingerprint(self) -> str:
        digests = " ".join(source.manifest.digest for source in self.sources)
        shares = ":".join(map(str, self._blend.weights))
        held = "+".join(str(source.split.held) for source in self.sources)
        of = "+".join(str(source.split.count) for source in self.sources)
        how = "packed" if self.config.packed else "padded"
        return (
            f"chat {hashlib.sha256(digests.encode()).hexdigest()[:16]}, {how}, too long: "
            f"{self.config.too_long}, blended {shares}, {held} of {of} conversations held out"
        )

    def answer_prompt(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Return the tokens behind which an answer begins, and those that end it, as the first folder has it.

        Raises:
            DataError: the folder is missing, was prepared without keeping its template, or that refuses them.
        """
        return self._conversations.answer_prompt(messages)

    @cached_property
    def _conversations(self) -> Prompts:
        """The first folder's template and tokenizer, read once for all prompts."""
        folder = Path(self.config.paths[0])
        return Prompts(known_conversations(folder, read_manifest(folder)))

    def counts(self, length: int) -> dict[str, int]:
        """Return how many sequences both splits have.

        Raises:
            DataError: a source has none to train on.
        """
        for path, count in zip(
            self.config.paths, self.sequences_of_sources(length, validation=False), strict=True
        ):
            if not count:
                raise DataError(nothing_to_learn(path, length))
        return super().counts(length)

    def sequences_of_sources(self, length: int, *, validation: bool) -> list[int]:
        """Return how many sequences of that length a split has of each source, [sources]."""
        return [len(packs) for packs in self._packs_of(length, validation=validation)]

    def _packs_of(self, length: int, *, validation: bool) -> list[Packs]:
        key = length, validation
        if key not in self._packs:
            self._packs[key] = [source.packs(length, validation=validation) for source in self.sources]
        return self._packs[key]

    def read_batch(self, numbers: Integers, *, validation: bool) -> Batch:
        """Return those sequences of a split.

        Raises:
            DataError: a shard is damaged there, by its name.
        """
        length, shape = self.length, (len(numbers), self.length)
        tokens, begins = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        packs = self._packs_of(length, validation=validation)
        firsts = np.cumsum([0, *map(len, packs)])
        for row, number in enumerate(numbers.tolist()):
            source = int(np.searchsorted(firsts, number, side="right")) - 1
            at = 0
            for conversation in packs[source].of(number - int(firsts[source])).tolist():
                place, learned = self.sources[source].place(conversation, length)
                read = self.corpora[source].read(np.array([place]), len(learned))[0]
                end = at + min(len(read), length)
                tokens[row, at:end] = read[:length]
                targets[row, at : at + len(read) - 1] = np.where(learned[1:], read[1:], IGNORE)
                begins[row, at:end] = at
                at = end
            begins[row, at:] = at  # padding sees padding alone
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            document_starts=torch.from_numpy(begins) if self.config.packed else None,
        )

    def describe(self) -> str:
        """Return what was opened, in one line."""
        manifests = [source.manifest for source in self.sources]
        sources = f"{len(manifests)} sources, " if len(manifests) > 1 else ""
        out = sum(source.left_out(self.length) for source in self.sources)
        left_out = f"{out} of them left out as too long, " if out else ""
        return (
            f"chat: {sources}{sum(m.documents for m in manifests)} conversations, {left_out}"
            f"{sum(m.tokens for m in manifests)} tokens ({manifests[0].tokenizer.name}), "
            f"{self.train} sequences to train on, {self.validation} held out"
        )
