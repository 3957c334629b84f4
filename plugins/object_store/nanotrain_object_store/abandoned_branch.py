"""Records which checkpoints of the store are of an abandoned branch, until the store is updated. Torch-free.

If a run rolls back while its store is down, and is then killed, its next start must not resume from the
branch that it has abandoned.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import attrs

from nanotrain_core.api import write_text_atomically

#: A file of the run folder.
LEFT_AFTER = "object-store-left-after"


@attrs.define
class LeftBranch:
    """``after``: checkpoints of later steps are of a branch that was left; None: there is none."""

    folder: Path | None
    """Of the run; None: it is remembered in this process alone."""
    after: int | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Read what an earlier process has noted."""
        if self.folder is not None:
            with suppress(OSError, ValueError):
                self.after = int((self.folder / LEFT_AFTER).read_text(encoding="utf-8"))

    def note(self, step: int) -> None:
        """Note that the run goes on from ``step``. The earliest such step counts."""
        self.after = step if self.after is None else min(step, self.after)
        if self.folder is not None:
            write_text_atomically(self.folder / LEFT_AFTER, str(self.after))

    def done(self, step: int) -> None:
        """Forget it: the store's listing has nothing later than ``step`` any more."""
        if self.after == step:
            self.after = None
            if self.folder is not None:
                (self.folder / LEFT_AFTER).unlink(missing_ok=True)

    def leaves(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` is of a branch that was left."""
        return self.after is not None and step > self.after
