"""Dispatches events to monitors, and prevents a failing monitor from ending the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    FailedSaveReport,
    MetricsReport,
    Monitor,
    Restore,
    RollbackReport,
    RunInfo,
    StepEnd,
    StepReport,
    TrainState,
    UpdateReport,
)
from nanotrain_core.errors import PluginError, expect_result
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import Names
from nanotrain_core.metrics.of_reports import of_checkpoint, of_evaluation
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.metrics.reducer import MetricReducer, of_core
from nanotrain_core.run.derived_metrics import with_derived
from nanotrain_core.run.monitor_collectives import FailedElsewhere, MonitorCollectives
from nanotrain_core.run.monitor_failures import MonitorFailures
from nanotrain_core.run.plain_json import as_json
from nanotrain_core.run.stop import Rollback, StopRequest
from nanotrain_core.watch.progress import Progress


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
        """``weights_ready`` waits for weights in flight, for monitors that read them."""
        self.monitors, self.stop = monitors, stop
        self.failures = MonitorFailures(strict=strict)
        self.weights_ready = weights_ready
        self.reducer: MetricReducer | None = None
        self.collectives: MonitorCollectives | None = None
        self.progress = Progress()
        self._rollbacks = 0
        self.left_out: frozenset[int] = frozenset()
        """Monitors, by their index in the run, that failed in ``on_start`` on any rank."""
        self._failed: dict[int, Exception] = {}
        self._loaded: Mapping[str, Any] = {}

    @property
    def monitors(self) -> Sequence[Monitor]:
        """The monitors, in the order in which they are called."""
        return self._monitors

    @monitors.setter
    def monitors(self, monitors: Sequence[Monitor]) -> None:
        self._monitors, self._by_event = monitors, dict[str, list[tuple[int, Monitor]]]()

    def start(self, run: RunInfo, reducer: MetricReducer, collectives: MonitorCollectives) -> None:
        """The run is about to take its first step.

        What monitors publish goes to ``reducer``, and ``collectives`` coordinates theirs across ranks.
        A monitor that fails here, on any rank, was never set up: it receives no further events on any rank.
        """
        self.reducer, self.collectives, self.progress = reducer, collectives, run.progress
        self.left_out, failed = frozenset(), set[int]()
        known = [*CORE, *(metric for monitor in self.monitors for metric in monitor.declared)]
        declared = tuple({metric.name: metric for metric in reversed(known)}.values())[::-1]
        for number, (name, monitor) in enumerate(self._named()):
            own = Metrics(reducer, number, name, strict=self.failures.strict)
            observers: dict[str, Any] = {
                name: partial(getattr(run, name), number, run.mesh)
                for name in ("observe_outputs", "observe_calls")
            }
            info = attrs.evolve(run, metrics=own, declared=declared, **observers)
            failed |= self._dispatch("on_start", info, to=[monitor])
        by_rank: list[set[int]] = run.mesh.gather(failed)
        self.left_out = frozenset().union(*by_rank)
        for number, (name, _) in enumerate(self._named()):
            ranks = [rank for rank, numbers in enumerate(by_rank) if number in numbers]
            if ranks and run.rank == 0:
                text = "a monitor could not start: it is left out"
                self.failures.log.warning(text, monitor=name, on_ranks=ranks)

    def before_restore(self, restore: Restore) -> None:
        """The run is about to search for its checkpoints. A monitor that fails here, in any way, ends it.

        Otherwise the run would start from the beginning instead of from what the monitor should restore.
        """
        for monitor in self.monitors:
            monitor.on_before_restore(restore)

    def recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Ranks were restarted: return the state that a monitor has kept of the run, if any."""
        found = (monitor.on_recover(restore, at_least) for monitor in self.monitors)
        return next((state for state in found if state is not None), None)

    def before_update(self, update: UpdateReport) -> None:
        """The gradient of a step is complete, and the optimizer is about to use it."""
        self._dispatch("on_before_update", update)

    def after_update(self, update: UpdateReport) -> None:
        """The optimizer has taken its step."""
        self._dispatch("on_after_update", update)

    def fail_later(self, monitor: int, problem: Exception) -> None:
        """Make a monitor's next event fail: it failed in the middle of a pass, where no rank can stop."""
        self._failed.setdefault(monitor, problem)

    @property
    def every_step(self) -> bool:
        """Whether a monitor must receive every step."""
        return any(m.every_step for number, m in enumerate(self.monitors) if number not in self.left_out)

    def step(self, report: StepReport, *, logged: bool = True) -> None:
        """A step was done; if it is not ``logged``, only monitors that request every step receive it."""
        self._dispatch("on_step", report, to=None if logged else [m for m in self.monitors if m.every_step])

    def metrics(self, *reports: MetricsReport) -> None:
        """Metrics are known on every rank, as are the monitors that failed since the last logged step and the
        ranks they failed on."""
        for report in reports:
            self._metrics(report)

    def _metrics(self, report: MetricsReport) -> None:
        if report.failed and self.collectives is not None:
            self.collectives.drain()
            if self.collectives.rank == 0:
                for name, rank in report.failed.items():
                    text = "a monitor failed on a rank: what it published until this step is left out"
                    where: dict[str, Any] = {"on_rank": rank, "step": report.step}
                    self.failures.warn(f"{name} on rank {rank}", text, monitor=name, **where)
        for number, monitor in self._subscribers("derive"):
            if number in self.left_out:
                continue
            try:
                names = self.reducer.names[number] if self.reducer is not None else Names(monitor.declared)
                report = with_derived(report, monitor, monitor.derive(report), names)
            except Exception as problem:
                self.failures.handle(monitor, "derive", problem)
        self._dispatch("on_metrics", report)

    def evaluation(self, report: EvaluationReport) -> None:
        """Validation loss was measured.

        What monitors publish of it is reported now, and not with the next logged step, which a run that is
        restarted from this one's checkpoint takes without it. Collective.
        """
        self._dispatch("on_evaluation", report)
        self.metrics(of_core(report.step, of_evaluation(attrs.asdict(report))))
        if self.reducer is not None:
            self.metrics(*self.reducer.last(report.step))

    def before_save(self, step: int) -> None:
        """The state of the run after ``step`` is about to be saved."""
        self._dispatch("on_before_save", step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """A checkpoint is complete."""
        self._dispatch("on_checkpoint", report)
        self.metrics(of_core(report.step, of_checkpoint(attrs.asdict(report))))

    def save_failed(self, report: FailedSaveReport) -> None:
        """A checkpoint could not be saved."""
        self._dispatch("on_save_failed", report)

    def rollback(self, report: RollbackReport) -> None:
        """The run rolled back to a checkpoint."""
        self._rollbacks += 1
        self._dispatch("on_rollback", report)

    def step_end(self, end: StepEnd) -> None:
        """A step's work is complete."""
        self._dispatch("on_step_end", end)

    def end(self, report: EndReport) -> None:
        """The run has ended, successfully or not.

        Monitors that restore checkpoints come first: they also store them, and may fail the run even now. The
        others are then told that it failed.
        """
        first = {number for number, _ in self._subscribers("on_before_restore")}
        problem = None
        for _, monitor in sorted(enumerate(self.monitors), key=lambda each: each[0] not in first):
            if report.reason == "failed" and self.collectives is not None:
                self.collectives.forbidden = "after the run failed, on one rank perhaps"
            try:
                self._dispatch("on_end", report, to=[monitor])
            except Exception as ending:
                problem = problem or ending
                report = attrs.evolve(report, reason="failed")
        self.failures.log_repetitions()
        if problem is not None:
            raise problem

    def reducer_on(self, mesh: Mesh) -> MetricReducer:
        """Return the reducer of what the monitors of this rank publish. Collective.

        Raises:
            PluginError: another rank has different monitors: their values would be confused.
        """
        declared = {name: monitor.declared for name, monitor in self._named()}
        everyone: list[list[str]] = mesh.gather([*declared])
        for rank, names in enumerate(everyone):
            if names != everyone[0]:
                raise PluginError(
                    f"rank {rank} has the monitors {', '.join(names) or 'none'}, rank 0 "
                    f"{', '.join(everyone[0]) or 'none'}: give all ranks the same, in the same order"
                )
        return MetricReducer(mesh, declared)

    # --- what a checkpoint remembers of monitors ------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return the state of every monitor that has any, by name; for a disabled one, the loaded state."""
        found = {}
        for number, (name, monitor) in enumerate(self._named()):
            if number in self.left_out:
                found[name] = self._loaded.get(name, {})
                continue
            try:
                state = monitor.meta()
                if not isinstance(state, Mapping):
                    raise TypeError(f"it returned {type(state).__name__}; expected a dict, {{}} for nothing")
                found[name] = as_json(state)
            except Exception as problem:
                self.failures.handle(monitor, "meta", problem)
        return {name: meta for name, meta in found.items() if meta}

    def suspect_steps(self) -> int:
        """Return how many of the last steps a monitor may still find bad."""
        most = 0
        for number, monitor in enumerate(self.monitors):
            try:
                if number not in self.left_out:
                    name = f"monitor {type(monitor).__name__}"
                    most = max(most, expect_result(name, "suspect_steps", monitor.suspect_steps(), int))
            except Exception as problem:
                self.failures.handle(monitor, "suspect_steps", problem)
        return most

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore the state of every monitor."""
        self._loaded = meta
        for number, (name, monitor) in enumerate(self._named()):
            try:
                if name in meta and number not in self.left_out:
                    monitor.load_meta(meta[name])
            except Exception as problem:
                self.failures.handle(monitor, "load_meta", problem)

    def _named(self) -> Iterator[tuple[str, Monitor]]:
        """Yield every monitor with the name of its class, the second of a class with an index."""
        seen: Counter[str] = Counter()
        for monitor in self.monitors:
            name = type(monitor).__name__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name}-{seen[name]}", monitor

    def _dispatch(self, event: str, *arguments: Any, to: Sequence[Monitor] | None = None) -> set[int]:
        """Call ``event`` of the monitors that implement it; raise and handle failures of :meth:`fail_later`.

        A failure that ends the run is raised once all are called: the others may write or send the event.

        Returns:
            The indices of those that failed.
        """
        failed, receivers = set[int](), self._subscribers(event)
        if self.left_out or self._failed or to is not None:
            addressed = {
                number for number, monitor in receivers if to is None or any(monitor is each for each in to)
            }
            receivers = [
                (number, monitor)
                for number, monitor in enumerate(self.monitors)
                if number not in self.left_out and (number in addressed or number in self._failed)
            ]
        if not receivers:
            return failed
        if any(monitor.reads_weights for _, monitor in receivers):
            self.weights_ready()
        about = arguments[0]
        step = getattr(about, "step", about if isinstance(about, int) else 0)
        called = self._rollbacks, event, step, next(iter(getattr(about, "values", ())), "")
        outer, ending = self.progress.go_to("monitors"), None
        try:
            for number, monitor in receivers:
                try:
                    self._call(number, called, arguments)
                except Exception as problem:
                    failed.add(number)
                    try:
                        self.failures.handle(monitor, event, problem)
                    except Exception as raised:
                        ending = ending or raised
        finally:
            self.progress.go_to(outer)
        if ending is not None:
            raise ending
        return failed

    def _subscribers(self, event: str) -> list[tuple[int, Monitor]]:
        """Return the monitors that implement ``event``, with their indices. A step has many events."""
        found = self._by_event.get(event)
        if found is None:
            found = self._by_event[event] = [
                (number, monitor)
                for number, monitor in enumerate(self.monitors)
                if getattr(getattr(monitor, event), "__func__", None) is not getattr(Monitor, event)
            ]
        return found

    def _call(self, number: int, called: tuple[int, str, int, str], arguments: Sequence[Any]) -> None:
        """Call a monitor. Announce a failure to ranks that wait in a collective of the monitor, and record it
        to be reduced with the metrics.

        ``called`` identifies the event on all ranks: the number of rollbacks so far, the event's name, its
        step, and the name of its argument.
        """
        event, collectives = called[1], self.collectives
        if self.reducer is None or collectives is None:
            self._invoke(number, event, arguments)
            return
        collectives.at = number, called
        try:
            self._invoke(number, event, arguments)
        except Exception as problem:
            if not isinstance(problem, FailedElsewhere):
                collectives.tell_failure()
            self.reducer.fail(number)
            raise
        finally:
            collectives.at = None

    def _invoke(self, number: int, event: str, arguments: Sequence[Any]) -> None:
        """Call a monitor, and record its request."""
        if number in self._failed:
            raise self._failed.pop(number)
        request = getattr(self._monitors[number], event)(*arguments)
        if request is None:
            return
        if request == "stop":
            self.stop.request("stopped")
        elif isinstance(request, Rollback) and request.onset <= getattr(arguments[0], "step", 0):
            self.stop.request_rollback(request)
        else:
            raise TypeError(f'{event} returned {request!r}; expected None, "stop", an earlier Rollback')
