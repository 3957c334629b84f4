"""The monitor ``object_store``: uploads the run's checkpoints while training continues."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import structlog

from nanotrain_core.api import CheckpointError, Exit
from nanotrain_core.api.torch import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    Monitor,
    Restore,
    RollbackReport,
    RunInfo,
    StepReport,
    TrainState,
)
from nanotrain_object_store import ObjectStoreConfig, before_restore
from nanotrain_object_store.prefix import Prefix
from nanotrain_object_store.staged import Staged, clear_scratch, stage
from nanotrain_object_store.store import Store
from nanotrain_object_store.stored import Stored, find_local
from nanotrain_object_store.uploads import Uploads

#: Seconds that the end of a run waits until the prefix is released.
FAREWELL = 2.0
#: Seconds between two checks of the last upload.
BETWEEN = 0.1


class NotUploaded(CheckpointError):
    """The last checkpoint of a run is not in the store."""

    exit_code = Exit.UNSAVED


class ObjectStore(Monitor):
    """See the README. Nothing happens in a run without a folder, which saves nothing."""

    reads_weights = False

    def __init__(self, config: ObjectStoreConfig) -> None:
        self.config = config
        self.store: Store | None = None
        self.prefix: Prefix | None = None
        self.uploads: Uploads | None = None
        self.evaluated: int | None = None
        self._in_store: frozenset[int] = frozenset()
        """Steps that were in the store when the run began."""
        self._diverged: int | None = None
        """A step of which the store has another checkpoint than the disk."""
        self._to_compare: list[Stored] = []
        """Of the store, if that of the disk has not been compared with it."""
        self._saved: int | None = None
        """The newest step that is on the disk."""

    # --- before a checkpoint is looked for ------------------------------------------------------

    def on_before_restore(self, restore: Restore) -> None:
        """Acquire the prefix, and fetch the checkpoint that will be loaded."""
        mesh, again = restore.mesh, self.prefix is not None
        url = self.config.url.replace("{folder}", restore.folder.parent.name)
        self.store = Store(url, part_mib=self.config.part_mib)
        found = before_restore.Found()
        if mesh.rank == 0 and not again:
            clear_scratch(restore.folder)
            own = before_restore.owner_of(restore)
            run_folder, config = restore.folder.parent, self.config
            self.prefix = Prefix(self.store, own, keep=config.keep, lease=config.lease, folder=run_folder)
            self.prefix.begins_anew = restore.which is None
            found = before_restore.ask(self.store, self.prefix, restore)
        found = mesh.gather(found)[0]
        if found.refusal is not None:
            raise found.refusal
        if found.down and mesh.rank == 0:
            log = structlog.get_logger("nanotrain.object_store")
            text = "the object store does not answer, and the run begins without it"
            log.warning(text, url=self.store.url, problem=found.down)
        # A restart from memory needs no checkpoint: see on_recover.
        brought = before_restore.bring(self.store, found.stored, restore, comparing=not restore.restarted)
        self._to_compare = found.stored if brought.later else []
        self._in_store, self._diverged = frozenset(each.step for each in found.stored), brought.diverged
        self._elsewhere = restore.which is not None and before_restore.is_elsewhere(restore.which)
        if self.prefix is not None:
            self.prefix.begin()

    def on_recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Compare the checkpoint on the disk, as no monitor before this one has restored the run."""
        if self._to_compare and self.store is not None:
            self._diverged = before_restore.bring(self.store, self._to_compare, restore).diverged
        return None

    # --- the run ----------------------------------------------------------------------------------

    def on_start(self, run: RunInfo) -> None:
        """Upload what an earlier process has saved and could not upload."""
        self.run = run
        if self.store is None or run.folder is None:
            return
        self.uploads = Uploads(run.name, self.store, self.prefix, run.mesh)
        first = run.first_step
        if not first:
            return
        # If the run resumes from another path, earlier checkpoints of the prefix belong to another branch,
        # like those in the run folder, which the checkpoint format sets aside.
        ours = first in self._in_store and first != self._diverged and not self._elsewhere
        self.uploads.go_back(-1 if self._elsewhere else first - (first == self._diverged))
        if ours:
            self._saved = self.uploads.uploaded = first
            return
        path = find_local(run.folder / "checkpoints", first)
        if all(run.mesh.gather(path is not None)) and path is not None:
            self._saved = first
            everything = None if run.rank == 0 else ()
            self._add(stage(first, path, everything, rank=run.rank))  # not known what it may delete

    def on_step(self, report: StepReport) -> None:
        """See how far the upload is, and tell."""
        if self.uploads is None:
            return
        self.uploads.advance()
        if self.run.rank == 0:
            publish = self.run.metrics.scalar
            publish("checkpoint/upload_age", time.monotonic() - self.uploads.uploaded_at)
            publish("checkpoint/uploads_left_out", float(self.uploads.left_out))
            if self.uploads.seconds is not None:
                publish("checkpoint/upload_seconds", self.uploads.seconds)
                self.uploads.seconds = None

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Upload it next."""
        if self.uploads is None:
            return
        self._saved = report.step
        said = any(self.run.mesh.gather(bool(report.written)))
        files = report.written if said or self.run.rank else None
        kept = None if report.skipped else {"evaluated": self.evaluated, "trusted": report.trusted}
        self._add(stage(report.step, report.path, files, rank=self.run.rank, retention=kept))

    def _add(self, staged: Staged) -> None:
        assert self.uploads is not None
        self.uploads.add(staged)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Remember the last one that was finite: retention keeps the checkpoint from before it."""
        if math.isfinite(report.loss):
            self.evaluated = report.step

    def on_rollback(self, report: RollbackReport) -> None:
        """Leave behind what is later than the checkpoint that the run went back to."""
        if self.uploads is not None:
            self.uploads.go_back(report.restored)
            self._saved = report.restored

    def meta(self) -> dict[str, Any]:
        """Remember the last evaluation, or that there was none: a rollback returns to that, too."""
        return {"evaluated": self.evaluated}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on from there."""
        evaluated = meta.get("evaluated")
        self.evaluated = evaluated if type(evaluated) is int else None

    # --- the end ----------------------------------------------------------------------------------

    def on_end(self, report: EndReport) -> None:
        """Wait for the last checkpoint to be in the store.

        Raises:
            NotUploaded: it is not, and the run will not be started again automatically.
        """
        uploads = self.uploads
        if uploads is None:
            return
        try:
            if report.reason in ("failed", "lost"):  # other ranks may be gone
                uploads.abandon()
                return
            asked = report.reason in ("preempted", "interrupted")
            limit = self.config.wait_at_end
            if asked:
                limit = min(limit, getattr(getattr(self.run.recipe, "run", None), "grace", limit) / 2)
            self._wait(uploads, limit, report.step)
            if self._saved is None or uploads.uploaded == self._saved:
                return
            text = (
                f"the last checkpoint, of step {self._saved}, is not in {uploads.store.url} but in "
                f"{self.run.folder} alone: {uploads.refused or 'the store did not take it in time'}"
            )
            if not asked:
                raise NotUploaded(f"{text}; run again with --resume to upload it")
            if self.run.rank == 0:
                structlog.get_logger("nanotrain.object_store").warning(text)
        finally:
            if self.prefix is not None:
                self.prefix.end(FAREWELL)

    def _wait(self, uploads: Uploads, limit: float, step: int) -> None:
        until = time.monotonic() + limit
        uploads.advance()
        while uploads.under_way:
            # All ranks record progress, so that the watchdog does not report this wait as a hang.
            self.run.progress.note("checkpoint", step)
            uploads.advance(late=time.monotonic() > until)
            time.sleep(BETWEEN)
