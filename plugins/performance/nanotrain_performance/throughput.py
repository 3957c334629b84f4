"""The ``throughput`` monitor: the speed of a run, and a breakdown of the step time.

Every rank breaks its step down by what the engine records: its own work in each part, and the time that it
waits for other ranks in collectives or for messages. Times are by the host's clock on a CPU, and by the
device's on a GPU: CUDA events at the ends of parts, and around each exchange on the stream that waits for it,
are read once they have completed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from nanotrain_core.api import peak_flops
from nanotrain_core.api.torch import (
    MetricsReport,
    Monitor,
    RollbackReport,
    RunInfo,
    StepReport,
    TimeSpent,
    UpdateReport,
)
from nanotrain_performance import ThroughputConfig
from nanotrain_performance.declared import SLOW
from nanotrain_performance.windows import in_order

#: Parts of a run that are not training; all others belong to a step.
BESIDE = ("start", "evaluation", "checkpoint", "end")
PARTS = ("data", "forward and backward", "gradient sync", "optimizer", "checkpoint", "evaluation")
MONITORS = ("monitors", "monitors before the update")
#: Fewest steps in the window for comparing the latest ones with the median.
FEW = 10


class Throughput(Monitor):
    """Times every step; publishes in logged ones."""

    reads_weights = False

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self.window = array("d")
        """Seconds of the last steps. An array: numbers of their own would lie all over the memory."""
        self.usual: list[float] = []
        """While steps are slow, the median from before in seconds, and the ranks and tokens of a step."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to measure."""
        self.run, self.steps = run, 0
        """Taken since the last logged one."""
        self.peak = self._peak()
        run.progress.time_device(run.device)
        self.before = run.progress.measured()
        self.window = array("d")
        self.tokens, self.since = 0, 0
        """Tokens of a step, and the first step that had as many."""
        self.settled = False
        """Whether the first logged step is over: until then data is opened, and layers compile."""
        self.last: tuple[float, float] | None = None
        self.paced: tuple[float, int] | None = None
        self.effective: float | torch.Tensor | None = None
        """Tokens since the last logged step that the loss does not ignore; None if they are not counted."""
        self.taken = 0
        """Tokens of the same steps, ignored or not."""

    def _peak(self) -> float | None:
        """Return the FLOP/s that MFU is a share of, None where they are not known."""
        if self.config.peak_tflops is not None:
            return self.config.peak_tflops * 1e12
        device = self.run.device
        return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def on_before_update(self, update: UpdateReport) -> None:
        """Measure the time since the same point of the last step, without parts that are not training."""
        now, spent = time.perf_counter(), self.run.progress.spent
        beside = sum(spent[part].seconds for part in BESIDE if part in spent)
        if update.tokens != self.tokens:  # in another phase: such steps take another time
            self.tokens, self.since = update.tokens, update.step
            del self.window[:]
        elif self.last is not None:
            self.window.append(now - self.last[0] - (beside - self.last[1]))
            del self.window[: -self.config.window]
        self.last = now, beside
        self.steps += 1
        if (counted := update.count("lm")) is not None:
            self.effective = counted if self.effective is None else self.effective + counted
            self.taken += update.tokens

    def on_step(self, report: StepReport) -> None:
        """Publish."""
        steps, self.steps = max(1, self.steps), 0
        self._speed(report)
        self._steps()
        self._parts(steps)
        self.settled = True

    def on_rollback(self, report: RollbackReport) -> None:
        """Restart the measurements: discarded steps are not reported."""
        self.before, self.steps, self.effective = self.run.progress.measured(), 0, None
        self.taken = 0
        self.last = self.paced = None

    def _speed(self, report: StepReport) -> None:
        run, put = self.run, self.run.metrics.scalar
        put("speed/tokens_per_second_per_device", report.tokens_per_second / run.world_size)
        put("speed/steps_per_second", 1 / report.seconds)
        if report.sequences_per_second:
            put("speed/samples_per_second", report.sequences_per_second)
        if self.effective is not None:  # as a share, since the report's interval may be shorter
            share = self.effective / max(1, self.taken)
            put("speed/effective_tokens_per_second", share * report.tokens_per_second)
        self.effective, self.taken = None, 0
        if report.flops_per_token:
            achieved = report.flops_per_token * report.tokens_per_second / run.world_size
            put("speed/tflops", achieved / 1e12)
            if self.peak:
                put("speed/mfu", achieved / self.peak)
        now = time.perf_counter()
        if self.paced is None:
            self.paced = now, report.step
        elif report.step > self.paced[1]:
            pace = (now - self.paced[0]) / (report.step - self.paced[1])
            put("speed/eta", (run.steps - report.step) * pace)

    def _steps(self) -> None:
        put, window = self.run.metrics.scalar, self.window
        if window:
            ascending = sorted(window)
            median = in_order(ascending, 0.5)
            put("time/step/p50", median)
            put("time/step/p95", in_order(ascending, 0.95))
            if len(window) >= FEW:
                put("time/step/recent", min(window[-3:]))

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Compare the last steps with the median; while they are slow, with that from before they were.

        The window's own median becomes that of slow steps, if they stay so.
        """
        recent, median = (report.values.get(f"time/step/{name}") for name in ("recent", "p50"))
        if recent is None or not median:
            return {}
        of = [self.run.world_size, self.tokens]
        usual = self.usual[0] if self.usual[1:] == of else median
        slow = recent > SLOW * usual and report.step >= self.since
        self.usual = [usual, *of] if slow else []
        return {"time/step/over_median": recent / usual}

    def meta(self) -> dict[str, Any]:
        """Return what slow steps are compared with, from reduced numbers: the same on every rank."""
        return {"usual": self.usual} if self.usual else {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it, if the run has as many ranks and tokens in a step as before."""
        self.usual = list(meta["usual"])

    def _parts(self, steps: int) -> None:
        put, before, none = self.run.metrics.scalar, self.before, TimeSpent()
        self.before = now = self.run.progress.measured()
        spent = {part: each.since(before.get(part)) for part, each in now.items()}
        data, passes, sync, optimizer, checkpoint, evaluation = (spent.get(part, none) for part in PARTS)
        step = monitors = exposed = messages = 0.0
        for part, each in spent.items():
            if part in BESIDE:
                continue
            step += each.seconds
            if part in MONITORS:
                monitors += each.seconds
            else:
                exposed += each.collectives
                messages += each.messages
        if step <= 0:  # a device's clock has not been read yet
            return
        put("time/data", data.busy / steps)
        if self.settled:
            put("time/data_fraction", data.busy / step)
        put("time/forward_backward", (passes.busy + sync.busy) / steps)
        put("time/optimizer", optimizer.busy / steps)
        put("time/exposed_communication", exposed / steps)
        put("time/exposed_fraction", exposed / step)
        put("time/pipeline_wait", messages / steps)
        put("time/monitors", monitors / steps)
        put("time/checkpoint", checkpoint.seconds)
        put("time/evaluation", evaluation.seconds)
