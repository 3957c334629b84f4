"""What makes a snapshot one: the text beside its bytes, written when they are complete. Torch-free.

Bytes that have no seal are being written, or were when a process was killed. The text ends with a checksum of
itself and has one of the bytes: memory of hosts is not always as good as their processors believe.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from nanotrain_core.api import CheckpointError

#: Larger texts are not read.
LARGEST = 64 * 2**20


@attrs.define(frozen=True, order=True)
class Moment:
    """A point of a run; later ones are larger."""

    rollbacks: int
    """Of the run until then: what comes after one is later, whatever its step."""
    step: int
    life: str
    """Of the processes that came there: others may have come to the same step otherwise."""


@attrs.define(frozen=True, kw_only=True)
class Seal:
    """Of one rank's snapshot."""

    rank: int
    """Whose state it is."""
    moment: Moment
    form: int
    """Checksum of names, shapes and dtypes of what the bytes are."""
    nbytes: int
    checksum: int
    """CRC-32 of the bytes."""
    meta: Mapping[str, Any]
    """As a checkpoint's."""

    def text(self) -> bytes:
        """Return it as what :func:`parse` reads."""
        body = json.dumps(attrs.asdict(self)).encode()
        return body + b"\n%d\n" % zlib.crc32(body)


def parse(text: bytes) -> Seal:
    """Read a seal.

    Raises:
        CheckpointError: it is damaged.
    """
    body, _, checksum = text.rstrip(b"\n").rpartition(b"\n")
    try:
        if int(checksum) != zlib.crc32(body):
            raise CheckpointError("its text has not its checksum")
        found = json.loads(body)
        moment = Moment(**found.pop("moment"))
        return Seal(moment=moment, **found)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError("its text is no seal") from None
