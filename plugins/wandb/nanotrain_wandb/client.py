"""The ``wandb`` monitor: one run of Weights & Biases for a run folder, through all of its attempts."""

from __future__ import annotations

import json
import secrets
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import wandb

from nanotrain_core.api import run_settings, write_text_atomically
from nanotrain_core.api.torch import EndReport, Histogram, MetricsReport, RollbackReport, RunInfo, Sink
from nanotrain_wandb import WandbConfig

#: In the run folder: the id under which W&B knows the run, and how often it has begun.
STATE = "wandb.json"

#: Of a histogram's bins, in W&B.
MOST_BINS = 512


class Wandb(Sink):
    """Sends every metric under its own name, with ``step`` as a metric for the x axis.

    W&B's own step can only increase: it would reject steps that are logged again after a resume or a
    rollback. Here it counts rows. W&B cannot delete the values of discarded steps: ``attempt``, sent with
    every row, distinguishes them, and the run's summary lists the points of resumes and rollbacks.
    """

    def __init__(self, config: WandbConfig) -> None:
        self.config = config
        self.patience = config.finish_seconds
        self.attempt = 1
        self.seams: list[str] = []
        self.state: Path | None = None

    def open(self, run: RunInfo) -> None:
        """Begin the run, or go on with the one that this run folder has begun."""
        self.state = run.folder / STATE if run.folder else None
        known = self._known()
        mode = None if self.config.mode == "auto" else self.config.mode
        self.run = wandb.init(
            id=known.get("id") or secrets.token_hex(4),
            resume="allow",
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.name or run.name,
            group=self.config.group,
            tags=list(self.config.tags) or None,
            mode=mode,
            dir=str(run.folder) if run.folder else None,
            config=run_settings(run.recipe),
            config_exclude_keys=[],
            allow_val_change=True,
            reinit="create_new",
            # No prompt, and no word among the run's own. Without its metadata: they have the command, and
            # what that sets may be a secret. Host, commit and versions are in W&B's record of the run, too.
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        where = {"sync": str(Path(self.run.dir).parent)} if self.run.offline else {"url": self.run.url}
        structlog.get_logger("nanotrain.wandb").info("W&B has the run", id=self.run.id, **where)
        self.attempt, self.seams = int(known.get("attempt", 0)) + 1, [*known.get("seams", ())]
        if known:
            self._seam(f"attempt {self.attempt}: resumed after step {run.first_step}")
        self._remember()

    def write(self, report: MetricsReport) -> None:
        """Send a row."""
        row: dict[str, Any] = {name: x for name, x in report.values.items() if self._wanted(name)}
        row |= {name: text for name, text in report.texts.items() if self._wanted(name)}
        for name, histogram in report.histograms.items() if self.config.histograms else ():
            if self._wanted(name):
                row[name] = wandb.Histogram(np_histogram=bins(histogram))
                outside = {"below": histogram.below, "above": histogram.above, "nan": histogram.nan}
                row |= {f"{name}/{what}": count for what, count in outside.items() if count}
        if row:
            self.run.log({**row, "step": report.step, "attempt": self.attempt})

    def rolled_back(self, report: RollbackReport) -> None:
        """Mark the seam: the next rows are of another attempt."""
        self.attempt += 1
        went = f"rolled back from step {report.step} to step {report.restored}"
        self._seam(f"attempt {self.attempt}: {went}: {report.reason}")
        self._remember()

    def finish(self, report: EndReport) -> None:
        """Send the rest."""
        self.run.finish(exit_code=int(report.reason == "failed"))

    def _seam(self, text: str) -> None:
        self.seams.append(text)
        self.run.summary["seams"] = self.seams

    def _known(self) -> dict[str, Any]:
        if self.state is None or not self.state.is_file():
            return {}
        known = json.loads(self.state.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}

    def _remember(self) -> None:
        if self.state is not None:
            known = {"id": self.run.id, "attempt": self.attempt, "seams": self.seams}
            write_text_atomically(self.state, json.dumps(known, indent=1) + "\n")

    def _wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.metrics)


def bins(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [n] and edges [n + 1] for W&B: neighboring bins are merged if it accepts no more."""
    join = -(-len(histogram.counts) // MOST_BINS)
    starts = np.arange(0, len(histogram.counts), join)
    counts = np.add.reduceat(np.asarray(histogram.counts), starts)
    return counts, np.asarray(histogram.edges)[[*starts, len(histogram.counts)]]
