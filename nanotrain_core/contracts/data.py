"""The interface of a data component."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.data.codec import HasTokenizer, TextCodec

__all__ = [
    "RESERVED_KEYS",
    "ChangesLength",
    "CountsHeldOut",
    "Data",
    "HasTokenizer",
    "MixesSources",
    "SkipsAhead",
    "TextCodec",
]

#: Keys that the core adds to those of :meth:`Data.meta`, in the state that it saves.
RESERVED_KEYS = frozenset({"taken", "tokens", "tokens_before", "skipped", "batch_sizes"})


class Data(Protocol):
    """Batches that are the same for every layout, with a position that can be saved and restored."""

    vocab_size: int
    """Number of different tokens: every token is below it."""
    bytes_per_token: float | None
    """Mean over the validation split, for reporting bits per byte; None when tokens are not text."""

    def open(self, *, length: int, seed: int) -> None:
        """Prepare sequences of ``length`` tokens.

        Raises:
            DataError: there is no data, or less than one sequence.
        """
        ...

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch of ``sequences`` and return this shard's rows of it.

        Returns:
            ``tokens`` and ``targets``, int64 [rows of the shard, length] in host memory; a target is the next
            token of its sequence, or ``IGNORE``. After the end of the data the next epoch begins. The core
            rejects other shapes and dtypes.
        """
        ...

    def validation_batch(self, index: int, sequences: int, shard: Shard) -> Batch | None:
        """Return this shard's rows of the ``index``-th validation batch; None after the last.

        Batches come in one fixed order. The last is padded with rows of ignored targets. A component
        whose ``validation`` is the number of its validation sequences (:class:`CountsHeldOut`) lets the core
        tell these rows from sequences without any target.
        """
        ...

    def describe(self) -> str:
        """Return one line about the data: its size, and what a model can learn from it if known."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, the same on every rank.

        Raises:
            DataError: the text cannot be encoded in this vocabulary.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...

    def meta(self) -> dict[str, Any]:
        """Return the position and a ``fingerprint`` of the data, as JSON.

        The core reserves the keys ``taken``, ``tokens``, ``tokens_before``, ``skipped`` and ``batch_sizes``.
        """
        ...

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            DataError: the fingerprint belongs to other data.
        """
        ...


@runtime_checkable
class SkipsAhead(Protocol):
    """Optional interface of a data component that need not read the sequences that training skips."""

    def skip(self, sequences: int) -> None:
        """Advance as :meth:`Data.train_batch` does, by this many sequences."""
        ...


@runtime_checkable
class CountsHeldOut(Protocol):
    """Optional interface of a data component that knows the number of its validation sequences."""

    validation: int
    """How many there are; 0 before :meth:`Data.open`. Rows of validation batches beyond it are padding."""


@runtime_checkable
class ChangesLength(Protocol):
    """Interface of a data component that provides ``changes_length``: phases change ``batch.length``."""

    def expect_lengths(self, lengths: Collection[int]) -> None:
        """Prepare for sequences of all these lengths. Called before :meth:`Data.open` if there are several.

        Validation data is disjoint from training data at every length, whatever was trained on before.
        """
        ...

    def set_length(self, length: int) -> None:
        """Return batches of sequences of ``length`` tokens from now on, for training and validation.

        The position does not change: after setting another length and then the old one, the next batch is the
        same as without the change. The next batch depends only on the position, the length with which it was
        reached, and ``length``. :meth:`Data.meta` holds what this requires, so that :meth:`Data.load_meta`
        restores a position whichever length is set when saving or loading.
        """
        ...


@runtime_checkable
class MixesSources(Protocol):
    """Optional interface of a data component that draws from several sources."""

    def tokens_by_source(self) -> Mapping[str, int]:
        """Return how many tokens of each source training has consumed since its beginning, over all ranks.

        A source name consists of letters, digits, ``_``, ``-`` and ``.``.
        """
        ...
