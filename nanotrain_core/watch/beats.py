"""The file with a rank's last heartbeat: written in place, so that a disk that fills up later stops no beat.

It has two slots of a fixed length, written in turn. Each has a CRC-32 of its text: a reader that meets a slot
half written takes the other one, which has the beat before.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanotrain_core.errors import LaunchError
from nanotrain_core.watch.scratch import RankFile

#: Bytes of a slot. A beat has 130 of them, with numbers of 7 digits.
SLOT = 512


class BeatFile:
    """The heartbeat file that a rank writes."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Allocate the file, without a beat.

        Raises:
            LaunchError: there is no space for the file.
        """
        self.path, self._tick = RankFile.BEAT.of(folder, rank), 0
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.pwrite(self._file, bytes(2 * SLOT), 0)
        except OSError as problem:
            raise LaunchError(
                f"the heartbeats of rank {rank} cannot be written to {folder}: {problem.strerror}; "
                "free space there, or set TMPDIR to another folder"
            ) from problem

    def write(self, beat: Mapping[str, Any]) -> None:
        """Write a beat into the slot that does not have the last one."""
        self._tick += 1
        text = json.dumps({**beat, "tick": self._tick}).encode().ljust(SLOT - 8)
        with contextlib.suppress(OSError):  # of a network file system: the next beat may be written
            os.pwrite(self._file, b"%08x" % zlib.crc32(text) + text, self._tick % 2 * SLOT)

    def delete(self) -> None:
        """Delete the file: the rank is done."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def read_beats(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the last heartbeat of each rank that has one; none of a file deleted before it is read."""
    for path in folder.glob(RankFile.BEAT.pattern):
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            slots = (data[at : at + SLOT] for at in (0, SLOT))
            beats = [json.loads(slot[8:]) for slot in slots if slot[:8] == b"%08x" % zlib.crc32(slot[8:])]
            if beats:
                yield max(beats, key=lambda beat: beat["tick"])
