"""What a data component must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nanotrain_core.batch import Batch, Shard


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
        """Advance by one global batch of ``sequences`` and return this shard's rows of it."""
        ...

    def validation_batch(self, index: int, sequences: int, shard: Shard) -> Batch | None:
        """Return this shard's rows of the ``index``-th validation batch; None after the last.

        Batches come in one fixed order. The last is padded with rows of ignored targets.
        """
        ...

    def describe(self) -> str:
        """Return what the data is, in one line: its size, and what a model can learn from it if known."""
        ...

    def encode(self, text: str) -> list[int]: ...

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
