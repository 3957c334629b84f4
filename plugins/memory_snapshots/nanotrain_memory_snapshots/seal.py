"""The seal of a snapshot: text next to its bytes, written when they are complete. Torch-free.

Bytes without a seal are being written, or were when a process was killed. The text ends with a checksum of
itself and contains one of the bytes, because host memory may be corrupted.
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
    """Rollbacks of the run until then: a moment after more of them is later, whatever its step."""
    step: int
    life: str
    """Identifies the processes that reached it: others may have reached the same step with another state."""


@attrs.define(frozen=True, kw_only=True)
class Seal:
    """The seal of one rank's snapshot."""

    rank: int
    """The rank whose state it is."""
    moment: Moment
    form: int
    """Checksum of names, shapes and dtypes in the bytes."""
    nbytes: int
    checksum: int
    """CRC-32 of the bytes."""
    meta: Mapping[str, Any]
    """As in a checkpoint."""

    def text(self) -> bytes:
        """Return it in the form that :func:`parse` reads."""
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
