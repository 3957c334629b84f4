"""The ``goodput`` monitor: share of wall-clock time spent training, what took the rest, and checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from nanotrain_core.api.torch import (
    CheckpointReport,
    EndReport,
    FailedSaveReport,
    Monitor,
    RollbackReport,
    RunInfo,
    StepReport,
)
from nanotrain_performance import GoodputConfig
from nanotrain_performance.declared import LOST
from nanotrain_performance.ledger import Ledger, read, write

#: Parts of a run that the ledger counts separately. All other time counts as training steps.
BESIDE = ("start", "data", "evaluation", "checkpoint")
#: Seconds between published values, unless an event occurs. A killed process loses no more than this.
EVERY = 1.0
#: Seconds between writes of the file, unless an event occurs; more, up to :data:`EVERY`, where writing would
#: take more than this share of the time.
WRITE_EVERY, WRITE_SHARE = 0.1, 0.001
MiB = 2**20


class Goodput(Monitor):
    """Keeps the ledger of the run on rank 0, in memory and in its folder."""

    reads_weights = False

    def __init__(self, config: GoodputConfig) -> None:
        del config  # it has no keys
        self.ledger: Ledger | None = None
        self.saved: dict[str, float] = {}
        """What is known of the newest checkpoint, by metric."""

    def on_start(self, run: RunInfo) -> None:
        """Go on with the ledger of the run, or begin it."""
        self.run, self.keeps = run, run.rank == 0
        if not self.keeps:
            return
        run.progress.time_device(run.device)
        now, before = time.perf_counter(), self._beside()
        if self.ledger is None:  # the first call of fit in this process
            began = time.time() - before["start"]  # composing and restoring are over
            self.ledger = read(run.folder) if run.folder is not None else None
            if self.ledger is None:
                self.ledger = Ledger(began=began, seen=began, first=run.first_step, step=run.first_step)
            else:
                self.ledger.begin_again(began, run.first_step)
            self.ledger.pass_time(before["start"], step=run.first_step, start=before["start"])
        self.clock, self.before, self.write_after, self.told = now, before, 0.0, -EVERY

    def on_step(self, report: StepReport) -> None:
        """Enter what has passed, and publish."""
        if self.keeps:
            self._enter(report.step)
            if self.clock - self.told > EVERY:
                self.told = self.clock
                self._publish()

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Remember it, and have its size added up in a thread: it may have many files."""
        if self.keeps and self.ledger is not None:
            self._enter(self.ledger.step, event=True)
            self.saved["checkpoint/ok"], self.ledger.saved_at = 1.0, self.ledger.seen
            self.told = -EVERY
            threading.Thread(target=self._measure, args=[report.path], daemon=True).start()

    def on_save_failed(self, report: FailedSaveReport) -> None:
        """Remember it."""
        self.saved["checkpoint/ok"], self.told = 0.0, -EVERY

    def on_rollback(self, report: RollbackReport) -> None:
        """Enter what is lost."""
        if self.keeps and self.ledger is not None:
            self._enter(report.step)
            self.ledger.go_back(report.restored)
            self.ledger.rollbacks += 1
            self.told = -EVERY
            self._write()

    def on_end(self, report: EndReport) -> None:
        """Leave all for the next attempt."""
        if self.keeps:
            self._enter(report.step, event=True)

    def _beside(self) -> dict[str, float]:
        """Return part -> seconds so far: ``data`` by the device's clock, other parts by the host's."""
        progress = self.run.progress
        spent = {**progress.spent, "data": progress.measured_in("data")}
        return {part: spent[part].seconds if part in spent else 0.0 for part in BESIDE}

    def _enter(self, step: int, *, event: bool = False) -> None:
        if self.ledger is None:
            return
        now, beside = time.perf_counter(), self._beside()
        passed = {part: beside[part] - self.before[part] for part in BESIDE}
        self.ledger.pass_time(now - self.clock, step=step, **passed)
        self.clock, self.before = now, beside
        if event or now > self.write_after:
            self._write()

    def _write(self) -> None:
        began = time.perf_counter()
        if self.run.folder is not None and self.ledger is not None:
            write(self.run.folder, self.ledger)
        ended = time.perf_counter()
        self.write_after = ended + min(EVERY, max(WRITE_EVERY, (ended - began) / WRITE_SHARE))

    def _publish(self) -> None:
        ledger, put = self.ledger, self.run.metrics.scalar
        assert ledger is not None
        put("goodput", ledger.productive / ledger.wall)
        for name in LOST:
            put(f"lost/{name}", getattr(ledger, name) / ledger.wall)
        put("reliability/restarts", ledger.restarts)
        put("reliability/rollbacks", ledger.rollbacks)
        put("reliability/lost_steps", ledger.lost_steps)
        for name, value in [*self.saved.items()]:
            put(name, value)
        if ledger.saved_at:
            put("checkpoint/age", ledger.seen - ledger.saved_at)

    def _measure(self, path: Path) -> None:
        """Record the size of a checkpoint; remove the value if the checkpoint was deleted meanwhile."""
        try:
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            self.saved["checkpoint/size"] = sum(each.stat().st_size for each in files) / MiB
        except OSError:
            self.saved.pop("checkpoint/size", None)
