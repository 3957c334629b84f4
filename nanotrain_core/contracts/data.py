"""What a data component must offer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.data.codec import HasTokenizer, TextCodec

__all__ = [
    "ChangesLength",
    "Data",
    "HasTokenizer",
    "MixesSources",
    "SkipsAhead",
    "TextCodec",
]


class Data(Protocol):
    """Batches that are the same for every layout, with a position that can be saved."""

    vocab_size: int
    bytes_per_token: float | None
    """Mean over the validation split, to report bits per byte; None when tokens are not text."""

    def open(self, *, length: int, seed: int) -> None:
        """Prepare sequences of ``length`` tokens.

        Raises:
            DataError: there is no data, or less than one sequence of it.
        """
        ...

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch of ``sequences`` and return this shard's rows of it.

        Returns:
            ``tokens`` and ``targets``, int64 [rows of the shard, length] in host memory; a target is the next
            token of its sequence, or ``IGNORE``. Behind the end of the data the next epoch begins. The core
            refuses other shapes and dtypes.
        """
        ...

    def validation_batch(self, index: int, sequences: int, shard: Shard) -> Batch | None:
        """Return this shard's rows of the ``index``-th validation batch; None after the last.

        Batches come in one fixed order. The last is padded with rows of ignored targets.
        """
        ...

    def describe(self) -> str:
        """Return what the data is, in one line: its size, and what a model can learn from it if known."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, the same on every rank.

        Raises:
            DataError: the text is none of these tokens'.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def meta(self) -> dict[str, Any]:
        """Return the position and a ``fingerprint`` of the data, as JSON.

        Not under the keys of :data:`nanotrain_core.run.feed.OWN_KEYS`, where the core keeps its own numbers.
        """
        ...

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go back to a position.

        Raises:
            DataError: the fingerprint is of other data.
        """
        ...


@runtime_checkable
class SkipsAhead(Protocol):
    """What a data component may offer beside, if it need not read what training leaves out."""

    def skip(self, sequences: int) -> None:
        """Advance as :meth:`Data.train_batch` does, by so many sequences."""
        ...


@runtime_checkable
class ChangesLength(Protocol):
    """What a data component offers that provides ``changes_length``: phases change ``batch.length``."""

    def expect_lengths(self, lengths: Collection[int]) -> None:
        """Prepare for sequences of all these lengths. Called before :meth:`Data.open`, if there are several.

        What is held out is apart from what is trained on at each of them, whatever was trained on before.
        """
        ...

    def set_length(self, length: int) -> None:
        """Return batches of sequences of ``length`` tokens from now on, to train on and to validate.

        The position stays: set to another length and back, the next batch is the one that would have come.
        Which batch follows depends on the position, the length that it was reached with, and ``length``
        alone. :meth:`Data.meta` has what that takes, so that a position is found again by
        :meth:`Data.load_meta` whichever length is set on either side.
        """
        ...


@runtime_checkable
class MixesSources(Protocol):
    """What a data component may offer beside, if it draws from several sources."""

    def tokens_by_source(self) -> Mapping[str, int]:
        """Return how many tokens of each source training has taken since its beginning, over all ranks.

        A source is named by a word of letters, digits, ``_``, ``-`` and ``.``.
        """
        ...
