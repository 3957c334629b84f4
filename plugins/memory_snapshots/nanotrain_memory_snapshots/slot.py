"""A slot for one snapshot: a reused file of bytes, and its seal next to it.

To be written, a slot loses its seal first and gets the new one last, atomically under its own name: a process
may be killed at any point. Nothing is flushed: files in memory outlive a process unchanged, but not a host.
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

#: Bytes before those of the snapshot: the run's progress, as rollbacks and steps.
HEAD = 64
#: Names of the slots of a rank's own snapshots, and of its neighbor's.
OWN, OTHER = "own", "other"
_REACHED = struct.Struct("<qq")


class Slot:
    """The files ``<name>.bin`` and ``<name>.json``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.bytes, self.sealed = folder / f"{name}.bin", folder / f"{name}.json"
        self._mapped: torch.Tensor | None = None
        seal = self.seal()
        self.moment = None if seal is None else seal.moment
        """The moment of the snapshot that is sealed here."""

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for this many bytes.

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
        """Return the bytes, memory-mapped from the file: uint8 [nbytes].

        Raises:
            OSError: there is not enough memory.
        """
        self.reserve(nbytes)
        if self._mapped is None:
            size = HEAD + nbytes
            self._mapped = torch.from_file(str(self.bytes), shared=True, size=size, dtype=torch.uint8)
        return self._mapped[HEAD:]

    def begin(self, nbytes: int) -> torch.Tensor:
        """Remove the seal, and return :meth:`payload` to be filled with another snapshot."""
        self.moment = None
        self.sealed.unlink(missing_ok=True)
        return self.payload(nbytes)

    def nbytes(self) -> int:
        """Return the capacity in bytes of a snapshot."""
        try:
            return max(0, self.bytes.stat().st_size - HEAD)
        except OSError:
            return 0

    def reached(self) -> tuple[int, int]:
        """Return the progress last recorded here, and zeros if none was."""
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
        """Discard the snapshot and the recorded progress."""
        self.begin(self.nbytes())
        self.note_reached(0, 0)

    def note_reached(self, rollbacks: int, step: int) -> None:
        """Record the run's progress so that it outlives this process."""
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
        """Read the snapshot, and return what is wrong with it: empty if it matches its seal."""
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
    """Return the slot to write next: one without a snapshot, otherwise the one with the oldest."""
    empty = [slot for slot in slots if slot.moment is None]
    return empty[0] if empty else min(slots, key=lambda slot: slot.moment or Moment(0, 0, ""))
