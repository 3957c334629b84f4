"""Tokens of a file, with a hash of each piece: damaged pieces are not trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanotrain_core.errors import DataError

#: An array of tokens, integers of any dtype.
Tokens = npt.NDArray[Any]

#: Bytes per hash. A sequence reads little more than its own bytes.
BLOCK_BYTES = 2**16
#: Bytes of a hash: half of a SHA-256.
HASH_BYTES = 16


class HashedTokens:
    """Tokens of a file, verified against their hashes as they are read: each piece once, at first use."""

    def __init__(
        self, path: Path, tokens: Tokens, hashes: bytes, compared: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Create it without reading the tokens.

        Args:
            path: the file, for error messages.
            tokens: [tokens], of an unsigned type.
            hashes: the result of :func:`block_hashes` for them.
            compared: :attr:`compared` of an earlier object for the same file: those pieces are not verified
                again.
        """
        self.path, self.tokens, self.hashes = path, tokens, hashes
        self.dtype = tokens.dtype
        self._piece = BLOCK_BYTES // tokens.itemsize
        self.compared = np.zeros(-(-tokens.nbytes // BLOCK_BYTES), np.bool_) if compared is None else compared
        """Which pieces this process has verified, [pieces]."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | npt.NDArray[np.int64]) -> Tokens:
        """Return tokens at a slice, or at an array of indices whose rows are verified from end to end.

        Raises:
            DataError: they differ from those that were written.
        """
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            spans = [(first, last - 1)] if step == 1 and first < last else [(0, len(self) - 1)]
        else:
            rows = index.reshape(-1, index.shape[-1])
            spans = list(zip(rows.min(1).tolist(), rows.max(1).tolist(), strict=True)) if index.size else []
        wanted = {n for first, last in spans for n in range(first // self._piece, last // self._piece + 1)}
        for number in sorted(wanted):
            if not self._is_sound(number):
                raise self.damaged(number * BLOCK_BYTES)
        return self.tokens[index]

    def damaged(self, byte: int) -> DataError:
        """Return the error for a piece that begins at that byte and differs from the one that was written."""
        return DataError(f"the tokens {self.path} are damaged at byte {byte}")

    def has_hashes(self) -> bool:
        """Return whether there are as many hashes as pieces."""
        return len(self.hashes) == len(self.compared) * HASH_BYTES

    def first_damaged(self) -> int | None:
        """Verify all pieces, and return the byte at which the first damaged one begins."""
        return next((n * BLOCK_BYTES for n in range(len(self.compared)) if not self._is_sound(n)), None)

    def _is_sound(self, number: int) -> bool:
        if not self.compared[number]:
            piece = self.tokens[number * self._piece : (number + 1) * self._piece]
            wanted = self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            self.compared[number] = _hash(np.ascontiguousarray(piece).data) == wanted
        return bool(self.compared[number])


def block_hashes(tokens: Tokens) -> bytes:
    """Return the hashes of ``tokens``: :data:`HASH_BYTES` bytes for each block of :data:`BLOCK_BYTES`."""
    return b"".join(map(_hash, _pieces(tokens)))


def _hash(piece: Any) -> bytes:
    return hashlib.sha256(piece).digest()[:HASH_BYTES]


def _pieces(tokens: Tokens) -> Iterable[Any]:
    data = np.ascontiguousarray(tokens).data.cast("B")
    return (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
