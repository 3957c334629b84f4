"""Decides when a run saves, and handles failed saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs
import structlog

from nanotrain_core.contracts import Checkpoint, CheckpointReport, FailedSaveReport, TrainState
from nanotrain_core.errors import CheckpointError, SaveFailed, expect_result
from nanotrain_core.watch.progress import Progress

#: Maximum consecutive failed saves before a run is ended: it would lose more with every step.
MOST_FAILED: Final = 3


class CheckpointSaver:
    """Begins saves and reports completed ones. A no-op without a checkpoint component."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        on_saved: Callable[[CheckpointReport], None],
        on_failed: Callable[[FailedSaveReport], None],
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint, self._on_saved, self._on_failed = checkpoint, on_saved, on_failed
        self._progress = progress or Progress()
        self._failed = self._step = 0
        self._retention: dict[str, Any] = {}
        self.begun = False
        """Whether a save has begun."""
        self._log = structlog.get_logger("nanotrain.checkpoint")

    def due(self, step: int) -> bool:
        """Return whether the checkpoint is due after ``step``."""
        return self.checkpoint is not None and self.checkpoint.due(step)

    def begin(self, step: int, state: TrainState, *, last: bool = False) -> None:
        """Save ``state`` after completing the previous save. With ``last`` it is complete when this returns.

        Raises:
            SaveFailed: the last save failed, or too many in a row did. Other failures are a warning, and
                training continues.
        """
        checkpoint = self.checkpoint
        if checkpoint is None:
            return
        self.advance(wait=True)
        self._step, self.begun = step, True
        meta = state.meta
        self._retention = {"trusted": meta.get("trusted"), "skipped": meta.get("skipped_in_a_row", 0)}
        self._attempt(lambda: checkpoint.save(step, state), last=last)
        self.advance(wait=last, last=last)

    def settle(self) -> None:
        """Wait until weights may change: a save in progress may still be reading them."""
        if self.checkpoint is not None:
            with self._progress.within("checkpoint"):
                self.checkpoint.settle()

    def advance(self, *, wait: bool, last: bool = False) -> None:
        """Report checkpoints that are complete by now; ``wait`` for one in progress."""
        checkpoint = self.checkpoint
        if checkpoint is not None:
            self._attempt(lambda: self._report(checkpoint.advance(wait=wait)), last=last)

    def _report(self, reports: Sequence[CheckpointReport]) -> None:
        name = f"checkpoint {type(self.checkpoint).__name__}"
        for report in expect_result(name, "advance", reports, Iterable):
            self._failed = 0
            self._on_saved(attrs.evolve(report, **self._retention))

    def _attempt(self, act: Callable[[], object], *, last: bool) -> None:
        """Call ``act``, which fails on all ranks or on none. A failure is reported, and training continues.

        Raises:
            SaveFailed: it failed and is the ``last`` save, or too many saves in a row have failed.
        """
        try:
            with self._progress.within("checkpoint"):
                act()
        except CheckpointError as problem:
            self._failed += 1
            self._on_failed(FailedSaveReport(self._step, str(problem), self._failed))
            if last or self._failed == MOST_FAILED:
                raise SaveFailed(f"{problem}; saves that failed in a row: {self._failed}") from None
            self._log.warning("a checkpoint could not be saved and the run goes on", problem=str(problem))


def steps_of(checkpoint: Checkpoint) -> list[int]:
    """Return the steps with a complete checkpoint, oldest first.

    Raises:
        PluginError: the component returned something else.
    """
    return [*expect_result(f"checkpoint {type(checkpoint).__name__}", "steps", checkpoint.steps(), Iterable)]
