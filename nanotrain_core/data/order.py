"""Sequences in a seeded order that is independent of the layout: shared by the built-in data components.

A batch is identified by positions in an endless stream of epochs, each a permutation of the training
sequences drawn from (seed, epoch). A rank takes its rows of the positions, so the number of ranks
never affects which sequences a step sees, and one integer is the whole state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import count as counted_from
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.checkpoint.run_state import NO_RUN_STATE
from nanotrain_core.data.prefetch import ReadAhead, Request
from nanotrain_core.errors import CheckpointError, DataError, PluginError
from nanotrain_core.run.random_state import stream_seed

Integers = npt.NDArray[np.int64]


class Order(Protocol):
    """Maps each position of an endless stream to a sequence."""

    def at(self, positions: Iterable[int]) -> Integers:
        """Return the sequence numbers at ``positions``, which may be any, in any order."""
        ...


class ShuffledOrder:
    """An order of ``count`` sequences, reshuffled in every epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epochs: dict[int, Integers] = {}

    def at(self, positions: Iterable[int]) -> Integers:
        """Return the sequence numbers at ``positions``; epoch e is positions e * count to (e + 1) * count."""
        places = [divmod(position, self.count) for position in positions]
        permutations = {epoch: self._permutation(epoch) for epoch in {epoch for epoch, _ in places}}
        self._epochs = permutations
        return np.array([permutations[epoch][place] for epoch, place in places], dtype=np.int64)

    def _permutation(self, epoch: int) -> Integers:
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        return np.random.default_rng(stream_seed(self.seed, "data/order", epoch)).permutation(self.count)


class SequenceData:
    """Batches of sequences of ``length`` + 1 tokens, which overlap by one to form inputs and targets.

    A subclass calls :meth:`prepare` when it knows its sequences and implements :meth:`read_sequences`, or
    :meth:`read_batch` if not every token is a target.
    See :class:`~nanotrain_core.contracts.Data`. A component that provides ``changes_length`` implements
    ``set_length`` with :meth:`prepare_length`: see :class:`~nanotrain_core.contracts.ChangesLength`.
    """

    position_in_tokens = True
    """How a position is converted when the sequence length changes. True, if an epoch has the same tokens at
    every length: it stays at the same fraction of the epoch, rounded up to a whole sequence. False, if the
    n-th sequence of each length has its own tokens: it stays at the same number of sequences."""
    read_ahead = 0
    """Training batches that a thread prefetches. Above 0, two threads at a time may call
    ``read_sequences`` or ``read_batch``, and ``set_length`` calls :meth:`prepare_length` before it changes
    what these read."""
    document_end: int | None = None
    """The token that ends a document, if tokens must attend only to their own document."""
    _expected = 0
    _ahead: ReadAhead | None = None

    def expect_lengths(self, lengths: Collection[int]) -> None:
        """Record the longest of the lengths that the run will set."""
        self._expected = max(lengths)

    def prepare(self, *, length: int, seed: int, train: int, validation: int, fingerprint: str) -> None:
        """Start at position 0 of ``train`` sequences.

        Sets the attributes ``length``, ``longest``, ``train``, ``validation``, ``position`` and
        ``fingerprint``: a subclass that stores something else uses other names.

        Args:
            length: sequence length in tokens, as the model reads it.
            seed: of the order.
            train: number of training sequences in an epoch.
            validation: number of held-out sequences.
            fingerprint: human-readable, and different for data in which a position means other sequences.
        """
        self._ahead = None
        self.longest, self._seed = max(self._expected, length), seed
        self.fingerprint = f"{fingerprint}, sequences of {self.longest}, seed {seed}"
        self.position, self._position_length, self._position_train = 0, length, train
        self.prepare_length(length, train=train, validation=validation)

    def prepare_length(self, length: int, *, train: int, validation: int) -> None:
        """Use this many sequences of ``length`` tokens; each length has its own order."""
        if self._ahead:
            self._ahead.clear()  # it reads sequences of the previous length
        self.length, self.train, self.validation = length, train, validation
        self._train_order = self.order(stream_seed(self._seed, "data/train"), validation=False)
        # Shuffled once, so that even the first few validation batches represent the whole split.
        self._validation_order = self.order(stream_seed(self._seed, "data/validation"), validation=True)

    def order(self, seed: int, *, validation: bool) -> Order:
        """Return the order of a split's sequences; a subclass may use another than a seeded shuffle."""
        return ShuffledOrder(self.validation if validation else self.train, seed)

    def _carry_position_over(self) -> None:
        """Convert the position to sequences of the current length. Only called before advancing."""
        if self.position_in_tokens and self._position_length != self.length:
            if self._position_train > 0:
                epochs, rest = divmod(self.position, self._position_train)
                self.position = epochs * self.train - (-rest * self.train // self._position_train)
            else:  # loaded from a checkpoint without it
                self.position = -(-self.position * self._position_length // self.length)
        self._position_length, self._position_train = self.length, self.train

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return tokens [len(numbers), length + 1], integers of any dtype, for these sequences of a split.

        ``numbers`` has at least one element.
        """
        raise NotImplementedError

    def read_batch(self, numbers: Integers, *, validation: bool) -> Batch:
        """Return these sequences of a split, with their targets.

        By default every token of :meth:`read_sequences` except the first is a target. ``numbers`` may be
        empty.
        """
        shape = (len(numbers), self.length + 1)
        if not len(numbers):  # a shard may have none of the last validation batch
            return _batch(np.zeros(shape, np.int64), self.document_end)
        found = self.read_sequences(numbers, validation=validation)
        read = np.asarray(found) if found is not None else np.empty(0)
        if read.dtype.kind not in "iu" or read.shape != shape:
            what = "None" if found is None else f"{read.dtype} {list(read.shape)}"
            raise PluginError(
                f"data {type(self).__name__}: its read_sequences returned {what}; "
                f"expected integers {list(shape)}"
            )
        return _batch(read, self.document_end)

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch and return this shard's rows.

        Raises:
            DataError: the training split holds fewer sequences than one batch.
        """
        if sequences > self.train:
            raise DataError(
                f"one batch takes {sequences} sequences of {self.length} tokens, but the training data has "
                f"{self.train}: lower batch.sequences or batch.length, or add data"
            )
        self._carry_position_over()
        wanted = Request(self.position, sequences, shard, self.length)
        if self.read_ahead and self._ahead is None:
            self._ahead = ReadAhead(self._read, self.read_ahead)
        if self._ahead is None:
            batch = self._read(wanted)
        else:
            behind = counted_from(self.position + sequences, sequences)
            batch = self._ahead.take(wanted, (Request(at, sequences, shard, self.length) for at in behind))
        self.position += sequences
        return batch

    def _read(self, wanted: Request) -> Batch:
        numbers = self._train_order.at(wanted.position + row for row in wanted.shard.rows(wanted.sequences))
        return self.read_batch(numbers, validation=False)

    def skip(self, sequences: int) -> None:
        """Advance without reading. A subclass with more state than the position overrides this too."""
        self._carry_position_over()
        self.position += sequences

    def validation_batch(self, index: int, sequences: int, shard: Shard) -> Batch | None:
        """Return this shard's rows of a validation batch, padded at the end; None after the last."""
        first = index * sequences
        if first >= self.validation:
            return None
        rows = [first + row for row in shard.rows(sequences)]
        numbers = self._validation_order.at(row for row in rows if row < self.validation)
        return self.read_batch(numbers, validation=True).padded(len(rows))

    def meta(self) -> dict[str, Any]:
        """Return sequences consumed so far, their length, the sequences of an epoch, and the fingerprint."""
        counted_in = {"length": self._position_length, "train": self._position_train}
        return {"position": self.position, **counted_in, "fingerprint": self.fingerprint}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a position.

        Raises:
            DataError: it is a position in other data.
            CheckpointError: it is not a valid position.
        """
        if meta.get("fingerprint") != self.fingerprint:
            raise DataError(
                "the checkpoint was trained on other data, so its position means nothing here\n"
                f"  checkpoint: {meta.get('fingerprint')}\n  this run:   {self.fingerprint}"
            )
        found = {"length": self.longest, "train": 0, **meta}
        for key in ("position", "length", "train"):
            if type(found.get(key)) not in (int, float):
                raise CheckpointError(f"{NO_RUN_STATE}: data.{key} is {found.get(key)}")
        self.position = int(found["position"])
        self._position_length, self._position_train = int(found["length"]), int(found["train"])


def _batch(sequences: Integers, document_end: int | None) -> Batch:
    sequences = np.asarray(sequences, np.int64)  # token files have smaller dtypes
    tokens = torch.from_numpy(sequences)
    starts = None if document_end is None else torch.from_numpy(document_starts(sequences, document_end))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document_starts=starts)


def document_starts(sequences: Integers, end: int) -> Integers:
    """Return the position where each token's document begins, [n, length], for tokens [n, length + 1].

    A document begins after a token ``end``; the first one of a sequence, which may contain only its end,
    begins with the sequence.
    """
    starts = np.zeros((len(sequences), sequences.shape[1] - 1), np.int64)
    behind = sequences[:, :-2] == end
    starts[:, 1:] = np.where(behind, np.arange(1, starts.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)
