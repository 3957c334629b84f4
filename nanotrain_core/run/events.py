"""Tells monitors what happens, and keeps a failing monitor from taking the run with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    FailedSaveReport,
    Monitor,
    RollbackReport,
    RunInfo,
    StepReport,
    UpdateReport,
)
from nanotrain_core.errors import NanotrainError
from nanotrain_core.run.plain_json import as_json
from nanotrain_core.run.stop import Rollback, StopRequest


class Events:
    """Calls every monitor in the recipe's order."""

    def __init__(
        self,
        monitors: Sequence[Monitor],
        stop: StopRequest,
        *,
        strict: bool = False,
        weights_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """``weights_ready`` waits for weights on their way, for monitors that read them."""
        self.monitors, self.stop, self.strict = monitors, stop, strict
        self.weights_ready = weights_ready
        self.log = structlog.get_logger("nanotrain.monitor")

    def start(self, run: RunInfo) -> None:
        """The run is about to take its first step."""
        self._tell("on_start", run)

    def before_update(self, update: UpdateReport) -> None:
        """The gradient of a step is complete, and the optimizer is about to use it."""
        self._tell("on_before_update", update)

    @property
    def every_step(self) -> bool:
        """Whether a monitor must hear of every step."""
        return any(monitor.every_step for monitor in self.monitors)

    def step(self, report: StepReport, *, logged: bool = True) -> None:
        """A step was done; if it is not ``logged``, only monitors that want every step hear of it."""
        self._tell("on_step", report, to=[m for m in self.monitors if logged or m.every_step])

    def evaluation(self, report: EvaluationReport) -> None:
        """Validation loss was measured."""
        self._tell("on_evaluation", report)

    def before_save(self, step: int) -> None:
        """What the run is after ``step`` is about to be saved."""
        self._tell("on_before_save", step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """A checkpoint is complete."""
        self._tell("on_checkpoint", report)

    def save_failed(self, report: FailedSaveReport) -> None:
        """A checkpoint could not be saved."""
        self._tell("on_save_failed", report)

    def rollback(self, report: RollbackReport) -> None:
        """The run went back to a checkpoint."""
        self._tell("on_rollback", report)

    def end(self, report: EndReport) -> None:
        """The run is over, well or not."""
        self._tell("on_end", report)

    # --- what a checkpoint remembers of monitors ------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return the state of every monitor that has any, by its name."""
        found = {}
        for name, monitor in self._named():
            with self._bearing(f"{name}.meta"):
                found[name] = as_json(monitor.meta())
        return {name: meta for name, meta in found.items() if meta}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Give every monitor its state back."""
        for name, monitor in self._named():
            with self._bearing(f"{name}.load_meta"):
                if name in meta:
                    monitor.load_meta(meta[name])

    def _named(self) -> Iterator[tuple[str, Monitor]]:
        """Yield every monitor after its class, the second of a class with its number."""
        seen: Counter[str] = Counter()
        for monitor in self.monitors:
            name = type(monitor).__name__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name}-{seen[name]}", monitor

    def _tell(self, event: str, *arguments: Any, to: Sequence[Monitor] | None = None) -> None:
        for monitor in self.monitors if to is None else to:
            if monitor.reads_weights:
                self.weights_ready()
            with self._bearing(f"{type(monitor).__name__}.{event}"):
                request = getattr(monitor, event)(*arguments)
                if request == "stop":
                    self.stop.request("stopped")
                elif isinstance(request, Rollback) and request.onset <= getattr(arguments[0], "step", 0):
                    self.stop.request_rollback(request)
                elif request is not None:
                    raise TypeError(
                        f'{event} returned {request!r}; expected None, "stop", an earlier Rollback'
                    )

    @contextmanager
    def _bearing(self, what: str) -> Iterator[None]:
        """Log what a monitor raises, unless it was said on purpose: it found the run not worth going on."""
        try:
            yield
        except Exception as problem:
            if self.strict or isinstance(problem, NanotrainError):
                raise
            self.log.exception("a monitor failed and the run goes on", monitor=what)
