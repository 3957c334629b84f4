"""A place for one snapshot: a file of bytes that is used again and again, and its seal beside it.

To be written, a slot loses its seal first and gets the new one last, under its own name at once: a process
may be killed at any point. Nothing is flushed: files in memory outlive a process as they are, and no host.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanotrain_core.api import CheckpointError
from nanotrain_memory_snapshots.seal import LARGEST, Moment, Seal, parse

#: Bytes before those of the snapshot: how far the run has come, as rollbacks and steps.
HEAD = 64
#: How slots are called that hold a rank's own snapshots, and its neighbour's.
OWN, OTHER = "own", "other"
_REACHED = struct.Struct("<qq")


class Slot:
    """The files ``<name>.bin`` and ``<name>.json``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.bytes, self.sealed = folder / f"{name}.bin", folder / f"{name}.json"
        self._mapped: torch.Tensor | None = None
        seal = self.seal()
        self.moment = None if seal is None else seal.moment
        """Of the snapshot that is sealed here."""

    def reserve(self, nbytes: int) -> None:
        """Have memory for so many bytes.

        Raises:
            OSError: there is not enough.
        """
        if self._mapped is not None and len(self._mapped) == HEAD + nbytes:
            return
        self._mapped = None
        file = os.open(self.bytes, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_size != HEAD + nbytes:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, HEAD + nbytes)
        finally:
            os.close(file)

    def payload(self, nbytes: int) -> torch.Tensor:
        """Return the bytes, which are the file's: uint8 [nbytes].

        Raises:
            OSError: there is not enough memory.
        """
        self.reserve(nbytes)
        if self._mapped is None:
            size = HEAD + nbytes
            self._mapped = torch.from_file(str(self.bytes), shared=True, size=size, dtype=torch.uint8)
        return self._mapped[HEAD:]

    def begin(self, nbytes: int) -> torch.Tensor:
        """Break the seal, and return :meth:`payload` to be filled with another snapshot."""
        self.moment = None
        self.sealed.unlink(missing_ok=True)
        return self.payload(nbytes)

    def nbytes(self) -> int:
        """Return how many bytes of a snapshot there is room for."""
        try:
            return max(0, self.bytes.stat().st_size - HEAD)
        except OSError:
            return 0

    def reached(self) -> tuple[int, int]:
        """Return what was last noted here, and zeros if nothing was."""
        with contextlib.suppress(OSError, struct.error), self.bytes.open("rb") as file:
            rollbacks, step = _REACHED.unpack(file.read(_REACHED.size))
            return rollbacks, step
        return 0, 0

    def close(self, text: bytes, moment: Moment) -> None:
        """Seal what was written, with the ``text`` of a seal of ``moment``."""
        hidden = self.sealed.with_suffix(".new")
        hidden.write_bytes(text)
        hidden.replace(self.sealed)
        self.moment = moment

    def clear(self) -> None:
        """Forget the snapshot, and how far the run had come."""
        self.begin(self.nbytes())
        self.note_reached(0, 0)

    def note_reached(self, rollbacks: int, step: int) -> None:
        """Note, whatever becomes of this process, how far the run has come."""
        self.payload(self.nbytes())
        assert self._mapped is not None
        words = bytearray(_REACHED.pack(rollbacks, step))
        self._mapped[: _REACHED.size] = torch.frombuffer(words, dtype=torch.uint8)

    def seal(self) -> Seal | None:
        """Return the seal, None if there is none or it is damaged."""
        with contextlib.suppress(OSError, CheckpointError):
            if self.sealed.stat().st_size <= LARGEST:
                return parse(self.sealed.read_bytes())
        return None

    def damage(self) -> str:
        """Read the snapshot, and return what is wrong with it: empty if it is as it was sealed."""
        seal = self.seal()
        if seal is None:
            return f"{self.sealed} is no seal"
        try:
            if self.bytes.stat().st_size != HEAD + seal.nbytes:
                return f"{self.bytes} has not the {HEAD + seal.nbytes} bytes that its seal says"
            if checksum(self.payload(seal.nbytes)) != seal.checksum:
                return f"{self.bytes} has not the bytes that were sealed"
        except (OSError, RuntimeError) as problem:
            return f"{self.bytes} cannot be read: {problem}"
        return ""


def checksum(payload: torch.Tensor) -> int:
    """Return the CRC-32 of bytes."""
    data: Any = payload.numpy()
    return zlib.crc32(data)


def to_write(slots: Sequence[Slot]) -> Slot:
    """Return the slot to write next: one without a snapshot, else the oldest snapshot's."""
    empty = [slot for slot in slots if slot.moment is None]
    return empty[0] if empty else min(slots, key=lambda slot: slot.moment or Moment(0, 0, ""))
