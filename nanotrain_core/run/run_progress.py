"""How far a run has come, as its checkpoints keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.define
class RunProgress:
    """Where the step loop stands between two steps, and what it has to make up for.

    Only the loop advances it. A checkpoint or a monitor's state restores it, and a rollback, which restores
    an older checkpoint, drops what was pending. The data's position is the feed's.
    """

    step: int = 0
    """Optimizer steps done, those before a resume included."""
    evaluation_pending: bool = False
    """Whether a stop request interrupted this step's evaluation: a resumed run repeats it."""
    save_pending: bool = False
    """Whether a save was due at an earlier step and could not be made then."""
    evaluated: int | None = None
    """The last step whose validation loss was finite."""

    def nothing_pending(self) -> None:
        """Drop what is pending: the run goes back to a step from before it."""
        self.evaluation_pending = self.save_pending = False

    def note_evaluation(self, loss: float) -> None:
        """Note this step's validation loss, for which retention keeps a checkpoint if it is finite."""
        if math.isfinite(loss):
            self.evaluated = self.step

    def meta(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return attrs.asdict(self)

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore it."""
        self.step = int(meta["step"])
        self.evaluation_pending = bool(meta["evaluation_pending"])
        self.save_pending = bool(meta["save_pending"])
        self.evaluated = meta["evaluated"]
