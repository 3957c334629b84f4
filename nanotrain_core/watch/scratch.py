"""Names of the files by which ranks and their launcher inform each other, in the launcher's own folder."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

#: This launch has saved a checkpoint of its own. Its time changes with each.
HAS_SAVED = "has-saved"
#: The newest step that needs no checkpoint, since a monitor has kept its state.
RECOVERABLE = "recoverable"
#: The time of the last failure, from the launcher to the ranks that it starts again.
FAILED_AT = "failed-at"
#: The path of the run folder, which rank 0 selects.
FOLDER = "folder"


class RankFile(Enum):
    """A file of each rank."""

    PID = "pid-{}"
    """The process of a rank that has begun and not ended; empty until it writes it."""
    BEAT = "beat-{}.json"
    """See :mod:`nanotrain_core.watch.beats`."""
    STACKS = "stacks-{}.txt"
    """The stacks of its threads, when the launcher asks for them."""
    FAILURE = "failure-{}.json"
    """Why it has failed."""

    def of(self, scratch: Path, rank: int | str) -> Path:
        """Return the path of a rank's file."""
        return scratch / self.value.format(rank)

    @property
    def pattern(self) -> str:
        """What matches the files of all ranks."""
        return str(self.value.format("*"))
