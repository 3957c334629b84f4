"""The ``profiler`` monitor: torch's profiler over chosen steps, a trace of each rank and one of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from nanotrain_core.api import write_atomically, write_text_atomically
from nanotrain_core.api.torch import EndReport, Monitor, RunInfo, UpdateReport
from nanotrain_inspect.memory_snapshot import MemorySnapshot
from nanotrain_inspect.merge import MERGED, merge_traces
from nanotrain_inspect.steps import Steps

if TYPE_CHECKING:
    from nanotrain_inspect import ProfilerConfig

#: Rows of the table of operators.
ROWS = 40


class Profiler(Monitor):
    """Writes ``profile/steps-100-105/rank0.json.gz`` in the run folder, and a table of operators beside it.

    A trace opens in https://ui.perfetto.dev. Its steps last from one update to the next: they include the
    time of monitors and reports, and of waiting for slower ranks.
    """

    reads_weights = False

    def __init__(self, config: ProfilerConfig) -> None:
        self.config = config
        (steps,) = Steps.parse(config.steps).parts
        self.first, self.last = max(1, steps.start), steps[-1]
        self.profile: Any = None
        self.snapshot: MemorySnapshot | None = None

    def on_start(self, run: RunInfo) -> None:
        """Begin, if the first step is the next one."""
        self.run = run
        self.log = structlog.get_logger("nanotrain.profiler")
        self.last = min(self.last, run.steps)
        self.chosen = run.rank in (self.config.ranks or range(run.world_size))
        if run.folder is not None and self.config.memory_snapshot and run.device.type == "cuda":
            self.snapshot = MemorySnapshot(Path(run.folder), run.rank)
        if run.folder is None:
            self.log.warning("there is no run folder: nothing is profiled")
        elif run.first_step >= self.last:
            self.log.warning("the steps to profile are over", last=self.last, resumed_after=run.first_step)
        else:
            self._advance(run.first_step)

    def on_after_update(self, update: UpdateReport) -> None:
        """Go on to the next step: begin before the first, end after the last."""
        if self.run.folder is not None and self.run.first_step < self.last:
            self._advance(update.step)

    def on_end(self, report: EndReport) -> None:
        """Write what was recorded so far; no merging if the run failed: ranks may be at different points."""
        if self.snapshot is not None:
            self.snapshot.stop()
        if self.profile is not None:
            self._finish(report.step, merge=report.reason != "failed")

    def _advance(self, done: int) -> None:
        """``done`` steps are done: the next begins."""
        warmup = self.first - 2  # after which the profiler records, and throws away, one step
        if done == max(warmup, self.run.first_step) and done < self.last and self.profile is None:
            self._begin(recording=done >= self.first - 1)
        elif self.profile is not None and done >= self.last:
            self._finish(done)
        elif self.profile is not None:
            self.profile.step()

    def _begin(self, *, recording: bool) -> None:
        if not self.chosen:
            self.profile = _Nothing()
            return
        on_gpu = self.run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

        def schedule(step: int) -> ProfilerAction:
            warming = step == 0 and not recording
            return ProfilerAction.WARMUP if warming else ProfilerAction.RECORD

        self.profile = profile(
            activities=activities,
            schedule=schedule,
            record_shapes=self.config.shapes,
            with_stack=self.config.stacks,
            profile_memory=self.config.memory,
        )
        self.profile.start()

    def _finish(self, done: int, *, merge: bool = True) -> None:
        profiled, self.profile = self.profile, None
        assert self.run.folder is not None
        folder = Path(self.run.folder) / "profile" / f"steps-{self.first}-{done}"
        if self.chosen:
            profiled.stop()
            folder.mkdir(parents=True, exist_ok=True)
            name = f"rank{self.run.rank}"
            write_atomically(folder / f"{name}.json.gz", lambda path: _export(profiled, path))
            write_text_atomically(folder / f"{name}.txt", _table(profiled, self.run.device) + "\n")
        if merge:
            ranks = [rank for rank, chosen in enumerate(self.run.mesh.gather(self.chosen)) if chosen]
            if self.run.rank == 0:
                self._tell(folder, ranks)

    def _tell(self, folder: Path, ranks: list[int]) -> None:
        shown = folder
        traces = {rank: folder / f"rank{rank}.json.gz" for rank in ranks}
        missing = [rank for rank, path in traces.items() if not path.exists()]
        if 1 < len(ranks) <= self.config.merge and not missing:
            merge_traces(traces, shown := folder / MERGED)
        elif missing:
            self.log.warning("traces of other hosts stayed there: nothing was merged", ranks=missing)
        self.log.info("profiled: open it in https://ui.perfetto.dev", path=str(shown))


class _Nothing:
    """A rank that is not profiled counts steps as the others do."""

    def step(self) -> None: ...


def _export(profiled: Any, path: Path) -> None:
    # torch compresses what ends with .gz, and write_atomically's temporary file does not.
    packed = path.with_name(f"{path.name}.json.gz")
    profiled.export_chrome_trace(str(packed))
    packed.replace(path)


def _table(profiled: Any, device: torch.device) -> str:
    on = "cuda" if device.type == "cuda" else "cpu"
    try:
        averages = profiled.key_averages()
    except UnicodeDecodeError as problem:  # torch 2.13 names some Python frames by memory that was freed
        return f"no table: torch cannot read the names of all events of this profile ({problem})"
    text: str = averages.table(sort_by=f"self_{on}_time_total", row_limit=ROWS)
    return text
