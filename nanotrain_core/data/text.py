"""Text files as sequences of tokens. Without a path: the Python standard library's source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.data.documents import fingerprint, read_documents
from nanotrain_core.data.held_out import Split, held_out
from nanotrain_core.data.order import Integers, SequenceData
from nanotrain_core.data.tokenizers import Tokenizer, make_tokenizer
from nanotrain_core.errors import DataError
from nanotrain_core.run.progress_bar import show_progress


class Text(SequenceData):
    """Documents concatenated and split into sequences, some of them held out.

    Sequence i reads tokens i * length up to (i + 1) * length and predicts the successor of each, so every
    token of the corpus except the first is predicted once, and the few after the last whole sequence never.

    Where phases change the length, the text is split into pieces of the longest one. These are held out, or
    trained on, as a whole; each is split into as many whole sequences of the current length as fit.
    """

    #: Maximum validation sequences on which bytes per token are measured.
    MEASURED = 1024

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    def tokenizer_alone(self) -> Tokenizer:
        """Return the tokenizer, without reading the documents."""
        return make_tokenizer(self.config.tokenizer)

    def open(self, *, length: int, seed: int) -> None:
        """Read, tokenize and split.

        Raises:
            DataError: files, tokenizer or its package are missing, or there is less than one sequence.
        """
        with show_progress("reading text"):
            documents = read_documents(self.config.paths, self.config.suffixes)
            digest = fingerprint(documents)
        self.tokenizer = self.tokenizer_alone()
        self.vocab_size = self.tokenizer.vocab_size
        if self.config.mask_documents:
            if self.tokenizer.separator is None:
                name = self.tokenizer.name
                raise DataError(f"data.mask_documents: tokenizer {name} has no token that ends documents")
            self.document_end = self.tokenizer.separator
        self.files = len(documents)
        self.tokens = self.tokenizer.tokenize(documents, digest)
        self._expected = max(self._expected, self.config.piece_length)  # prepare() records the piece length
        piece = self.longest = max(self._expected, length)
        count = (len(self.tokens) - 1) // piece
        if count < 1:
            raise DataError(
                f"the text has {len(self.tokens)} tokens in {self.files} files, but one sequence of "
                f"{piece} needs {piece + 1}: add text or lower batch.length"
            )
        self._split = Split(count, held_out(count, self.config.validation_fraction))
        self.prepare(
            length=length,
            seed=seed,
            **self._counts(length),
            fingerprint=f"text {digest[:16]}, {self.tokenizer.name}, "
            f"{self._split.held} of {count} sequences held out",
        )
        self.bytes_per_token = self._bytes_per_token()

    def set_length(self, length: int) -> None:
        """Split each piece into sequences of ``length`` tokens."""
        self.prepare_length(length, **self._counts(length))

    def _counts(self, length: int) -> dict[str, int]:
        each = self.longest // length
        return {"train": each * self._split.train, "validation": each * self._split.held}

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the tokens of these sequences of a split."""
        each = self.longest // self.length
        pieces = self._split.pieces(numbers // each, validation=validation)
        begins = pieces * self.longest + numbers % each * self.length
        places = begins[:, None] + np.arange(self.length + 1)
        return np.asarray(self.tokens[places], np.int64)

    def _bytes_per_token(self) -> float:
        """Measure on targets of the validation split, or of the training split if nothing is held out.

        Evenly spaced sequences are measured: they are in document order, and later documents may differ.
        """
        count = self.validation or self.train
        measured = min(self.MEASURED, count)
        numbers = np.arange(measured) * count // measured
        targets = self.read_sequences(numbers, validation=self.validation > 0)[:, 1:]
        return sum(self.tokenizer.byte_count(row) for row in targets.tolist()) / targets.size

    def describe(self) -> str:
        """Describe in one line what was read."""
        return (
            f"text: {self.files} files, {len(self.tokens)} tokens ({self.tokenizer.name}), "
            f"{self.train} sequences to train on, {self.validation} held out"
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return self.tokenizer.decode(tokens)
