"""Tells monitors what happens, and keeps a failing monitor from taking the run with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import structlog

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
from nanotrain_core.errors import NanotrainError, PluginError, describe
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.metrics.board import Board, of_core
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import Names
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.run.log import record
from nanotrain_core.run.plain_json import as_json
from nanotrain_core.run.stop import Rollback, StopRequest
from nanotrain_core.run.together import FailedElsewhere, Together
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
        """``weights_ready`` waits for weights on their way, for monitors that read them."""
        self.monitors, self.stop, self.strict = monitors, stop, strict
        self.weights_ready = weights_ready
        self.board: Board | None = None
        self.together: Together | None = None
        self.progress = Progress()
        self._rollbacks = 0
        self.left_out: frozenset[int] = frozenset()
        """Monitors, by their place in the run, that failed in ``on_start`` on any rank."""
        self._failed: dict[int, Exception] = {}
        self._loaded: Mapping[str, Any] = {}
        self._told: Counter[tuple[str, str]] = Counter()
        self.log = structlog.get_logger("nanotrain.monitor")

    def start(self, run: RunInfo, board: Board, together: Together) -> None:
        """The run is about to take its first step.

        What monitors publish goes to ``board``, and ``together`` has all ranks enter their collectives.
        A monitor that fails here, on whatever rank, was never set up: on all ranks it hears of nothing more.
        """
        self.board, self.together, self.progress = board, together, run.progress
        self.left_out, failed = frozenset(), set[int]()
        known = [*CORE, *(metric for monitor in self.monitors for metric in monitor.declared)]
        declared = tuple({metric.name: metric for metric in reversed(known)}.values())[::-1]
        for number, (name, monitor) in enumerate(self._named()):
            own = Metrics(board, number, name, strict=self.strict)
            taps: dict[str, Any] = {
                name: partial(getattr(run, name), number, run.mesh) for name in ("tap", "tap_calls")
            }
            info = attrs.evolve(run, metrics=own, declared=declared, **taps)
            failed |= self._tell("on_start", info, to=[monitor])
        by_rank: list[set[int]] = run.mesh.gather(failed)
        self.left_out = frozenset().union(*by_rank)
        for number, (name, _) in enumerate(self._named()):
            ranks = [rank for rank, numbers in enumerate(by_rank) if number in numbers]
            if ranks and run.rank == 0:
                self.log.warning("a monitor could not start: it is left out", monitor=name, on_ranks=ranks)

    def before_restore(self, restore: Restore) -> None:
        """The run is about to look for its checkpoints. A monitor that fails here, in any way, ends it.

        To go on would be to begin anew in the place of what it was to bring.
        """
        for monitor in self.monitors:
            monitor.on_before_restore(restore)

    def recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Ranks were started again: return what a monitor has kept of the run, if one has."""
        found = (monitor.on_recover(restore, at_least) for monitor in self.monitors)
        return next((state for state in found if state is not None), None)

    def before_update(self, update: UpdateReport) -> None:
        """The gradient of a step is complete, and the optimizer is about to use it."""
        self._tell("on_before_update", update)

    def after_update(self, update: UpdateReport) -> None:
        """The optimizer has made its step."""
        self._tell("on_after_update", update)

    def fail_later(self, monitor: int, problem: Exception) -> None:
        """Have the next event of a monitor fail: it did in the middle of a pass, where nobody can leave."""
        self._failed.setdefault(monitor, problem)

    @property
    def every_step(self) -> bool:
        """Whether a monitor must hear of every step."""
        return any(m.every_step for number, m in enumerate(self.monitors) if number not in self.left_out)

    def step(self, report: StepReport, *, logged: bool = True) -> None:
        """A step was done; if it is not ``logged``, only monitors that want every step hear of it."""
        self._tell("on_step", report, to=None if logged else [m for m in self.monitors if m.every_step])

    def metrics(self, *reports: MetricsReport) -> None:
        """Metrics are known on every rank, and which monitors failed since the last logged step, and
        where."""
        for report in reports:
            self._metrics(report)

    def _metrics(self, report: MetricsReport) -> None:
        if report.failed and self.together is not None:
            self.together.drain()
            if self.together.rank == 0:
                for name, rank in report.failed.items():
                    text = "a monitor failed on a rank: what it published until this step is left out"
                    if self._again(f"{name} on rank {rank}"):
                        record("warning", text, monitor=name, on_rank=rank)
                    else:
                        self.log.warning(text, monitor=name, on_rank=rank, step=report.step)
        for number, monitor in enumerate(self.monitors):
            if not _hears(monitor, "derive") or number in self.left_out:
                continue
            try:
                names = self.board.names[number] if self.board is not None else Names(monitor.declared)
                report = with_derived(report, monitor, monitor.derive(report), names)
            except Exception as problem:
                self._bear(monitor, "derive", problem)
        self._tell("on_metrics", report)

    def evaluation(self, report: EvaluationReport) -> None:
        """Validation loss was measured."""
        self._tell("on_evaluation", report)
        self.metrics(of_core(report.step, evaluation_values(report)))

    def before_save(self, step: int) -> None:
        """What the run is after ``step`` is about to be saved."""
        self._tell("on_before_save", step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """A checkpoint is complete."""
        self._tell("on_checkpoint", report)
        values = {"checkpoint/seconds": report.seconds, "checkpoint/blocked": report.blocked}
        self.metrics(of_core(report.step, values))

    def save_failed(self, report: FailedSaveReport) -> None:
        """A checkpoint could not be saved."""
        self._tell("on_save_failed", report)

    def rollback(self, report: RollbackReport) -> None:
        """The run went back to a checkpoint."""
        self._rollbacks += 1
        self._tell("on_rollback", report)

    def step_end(self, end: StepEnd) -> None:
        """Nothing is left to do of a step."""
        self._tell("on_step_end", end)

    def end(self, report: EndReport) -> None:
        """The run is over, well or not."""
        self._tell("on_end", report)
        self._tell_how_often()

    def board_on(self, mesh: Mesh) -> Board:
        """Return where the monitors of this rank publish. Collective.

        Raises:
            PluginError: another rank has other monitors: numbers of one would be taken for another's.
        """
        declared = {name: monitor.declared for name, monitor in self._named()}
        everyone: list[list[str]] = mesh.gather([*declared])
        for rank, names in enumerate(everyone):
            if names != everyone[0]:
                raise PluginError(
                    f"rank {rank} has the monitors {', '.join(names) or 'none'}, rank 0 "
                    f"{', '.join(everyone[0]) or 'none'}: give all ranks the same, in the same order"
                )
        return Board(mesh, declared)

    # --- what a checkpoint remembers of monitors ------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Return the state of every monitor that has any, by its name; of one left out what was loaded."""
        found = {}
        for number, (name, monitor) in enumerate(self._named()):
            if number in self.left_out:
                found[name] = self._loaded.get(name, {})
                continue
            try:
                found[name] = as_json(monitor.meta())
            except Exception as problem:
                self._bear(monitor, "meta", problem)
        return {name: meta for name, meta in found.items() if meta}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Give every monitor its state back."""
        self._loaded = meta
        for number, (name, monitor) in enumerate(self._named()):
            try:
                if name in meta and number not in self.left_out:
                    monitor.load_meta(meta[name])
            except Exception as problem:
                self._bear(monitor, "load_meta", problem)

    def _named(self) -> Iterator[tuple[str, Monitor]]:
        """Yield every monitor after its class, the second of a class with its number."""
        seen: Counter[str] = Counter()
        for monitor in self.monitors:
            name = type(monitor).__name__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name}-{seen[name]}", monitor

    def _tell(self, event: str, *arguments: Any, to: Sequence[Monitor] | None = None) -> set[int]:
        """Call ``event`` of the monitors that have it; one that failed in a pass hears of its failure.

        Returns:
            The places of those that failed.
        """
        failed = set[int]()
        hearing = [
            (number, monitor)
            for number, monitor in enumerate(self.monitors)
            if number not in self.left_out
            if (_hears(monitor, event) and (to is None or monitor in to)) or number in self._failed
        ]
        if any(monitor.reads_weights for _, monitor in hearing):
            self.weights_ready()
        if not hearing:
            return failed
        about = arguments[0]
        step = getattr(about, "step", about if isinstance(about, int) else 0)
        called = self._rollbacks, event, step, next(iter(getattr(about, "values", ())), "")
        with self.progress.within("monitors"):
            for number, monitor in hearing:
                try:
                    self._call(number, called, arguments)
                except Exception as problem:
                    failed.add(number)
                    self._bear(monitor, event, problem)
        return failed

    def _call(self, number: int, called: tuple[int, str, int, str], arguments: Sequence[Any]) -> None:
        """Call a monitor; have other ranks learn of a failure, before a collective of the monitor and with
        its metrics.

        ``called`` is what all ranks know the event by: how often the run went back, the event's name, its
        step, and a name of what it tells.
        """
        event = called[1]
        if self.board is None or self.together is None:
            self._heed(number, event, arguments)
            return
        try:
            with self.together.event(number, called):
                self._heed(number, event, arguments)
        except Exception:
            self.board.fail(number)
            raise

    def _heed(self, number: int, event: str, arguments: Sequence[Any]) -> None:
        """Call a monitor, and note what it asks for."""
        if number in self._failed:
            raise self._failed.pop(number)
        request = getattr(self.monitors[number], event)(*arguments)
        if request == "stop":
            self.stop.request("stopped")
        elif isinstance(request, Rollback) and request.onset <= getattr(arguments[0], "step", 0):
            self.stop.request_rollback(request)
        elif request is not None:
            raise TypeError(f'{event} returned {request!r}; expected None, "stop", an earlier Rollback')

    def _bear(self, monitor: Monitor, event: str, problem: Exception) -> None:
        """Log what a monitor has raised; raise it again if it was said on purpose: it found the run not worth
        going on."""
        what = f"{type(monitor).__name__}.{event}"
        if isinstance(problem, FailedElsewhere):
            if self.strict:
                raise NanotrainError(f"the monitor in {what}: {problem}") from None
            text = "a monitor leaves an event that it failed in elsewhere"
            if self._again(what, str(problem)):
                record("warning", text, monitor=what, why=str(problem))
            else:
                self.log.warning(text, monitor=what, why=str(problem))
            return
        if self.strict or isinstance(problem, NanotrainError):
            raise problem
        text = "a monitor failed and the run goes on"
        if self._again(what, describe(problem)):
            record("error", text, monitor=what, error=describe(problem))
        else:
            self.log.exception(text, monitor=what)

    def _again(self, what: str, problem: str = "") -> bool:
        """Return whether that was logged before, and count it. Numbers in ``problem`` may differ."""
        key = what, re.sub(r"\d+", "0", problem)
        self._told[key] += 1
        return self._told[key] > 1

    def _tell_how_often(self) -> None:
        """Log what was logged once and happened again, now that the run is over."""
        for (what, _), times in self._told.items():
            if times > 1:
                self.log.warning("a monitor failed again in the same way", monitor=what, times=times - 1)
        self._told.clear()


def _hears(monitor: Monitor, event: str) -> bool:
    """Return whether a monitor does anything in ``event``."""
    return getattr(getattr(monitor, event), "__func__", None) is not getattr(Monitor, event)


def with_derived(
    report: MetricsReport, monitor: Monitor, values: Mapping[str, float], names: Names
) -> MetricsReport:
    """Return ``report`` with what a monitor derived from it; ``names`` are those that it declares.

    Raises:
        PluginError: the monitor does not declare a name, or the report has it.
    """
    if not values:
        return report
    for name in values:
        if name in report.values or names.find(name) is None:
            why = "which the step has already" if name in report.values else "which it does not declare"
            raise PluginError(
                f"{type(monitor).__name__} derives the metric '{name}', {why}{names.near(name)}"
            )
    found = {name: metric for name in values if (metric := names.find(name)) is not None}
    return attrs.evolve(
        report,
        values={**report.values, **values},
        metrics={**report.metrics, **found},
        published=report.published | values.keys(),
    )


def step_values(report: StepReport) -> dict[str, float]:
    """Return the metrics that a step's report has."""
    plain = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "tokens_per_second", "seconds")
    values = {name: float(getattr(report, name)) for name in plain}
    optional = {"expert_load": report.expert_load, "bubble": report.bubble, "phase": report.phase}
    terms = {f"losses/{name}": value for name, value in report.losses.items()}
    return {**values, **terms, **{name: value for name, value in optional.items() if value is not None}}


def evaluation_values(report: EvaluationReport) -> dict[str, float]:
    """Return the metrics that an evaluation's report has."""
    bits = {} if report.bits_per_byte is None else {"validation/bits_per_byte": report.bits_per_byte}
    return {"validation/loss": report.loss, **bits}
