"""The ``alerts`` monitor: compares metrics and events with rules, and delivers alerts.

Every rank compares, since a checkpoint has the baselines and for how long each rule has held. Alerts are sent
by the thread of the sink, on rank 0: a webhook that does not answer delays the next alert, but no step. A
killed process sends no alert: only the scheduler can report that.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import structlog

from nanotrain_alerts import AlertRule, AlertsConfig, webhook_host
from nanotrain_alerts.deliver import Alert, deliver
from nanotrain_core.api import Baseline, Metric, NanotrainError, is_relative
from nanotrain_core.api.torch import (
    EndReport,
    FailedSaveReport,
    MetricsReport,
    RollbackReport,
    RunInfo,
    Sink,
)


@attrs.define
class State:
    """What has been sent of one rule, for one event or declared metric."""

    sent: float = -math.inf
    """Time of the last alert, by the monotonic clock."""
    left_out: int = 0
    """Steps since then in which the rule held."""


@attrs.define(frozen=True)
class Held:
    """An event, or a value for which a rule holds."""

    name: str
    """Of the event or the metric."""
    group: str
    """The metric as declared, ``gradients/norm/{block}``: its layers are one trouble."""
    text: str
    level: str
    value: float | None = None


class Alerts(Sink):
    """Logs and delivers an alert for each rule that holds, at most one in ``every_minutes``."""

    patience = 30.0

    def __init__(self, config: AlertsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.clock = config, clock
        self.states: dict[tuple[int, str], State] = {}
        self.in_a_row: dict[tuple[int, str], int] = {}
        """By rule and metric: logged steps for which the rule has held."""
        self.pending: deque[tuple[int, int, list[Held]]] = deque()
        """Step, rule and what it holds for, not yet told."""
        self.failed = False
        """Whether the run has failed, which is not yet told."""
        self.baselines: dict[str, Baseline] = {}
        """Of metrics whose declared rule is relative to that."""
        self.fitting: dict[str, list[tuple[int, AlertRule]]] = {}
        self.step = 0
        self.log = structlog.get_logger("nanotrain.alerts")

    def on_start(self, run: RunInfo) -> None:
        """Look for addresses in the environment of rank 0: a login node and other ranks need none.

        Raises:
            NanotrainError: there is none; on all ranks, as none could begin without the others.
        """
        targets = [self.config.to, *(rule.to for rule in self.config.rules if rule.to is not None)]
        names = [each.webhook_variable for each in targets if each.webhook_variable]
        if names:
            lacking = [name for name in names if not webhook_host(os.environ.get(name, ""))]
            for name in run.mesh.gather(lacking)[0]:
                raise NanotrainError(
                    f"alerts: the variable {name} of `webhook_variable` has no address on rank 0's host; "
                    f"expected `export {name}=https://host/path` before the run"
                )
        super().on_start(run)

    def open(self, run: RunInfo) -> None:
        """Tell that the run begins."""
        self.name, self.step, self.folder = run.name, run.first_step, run.folder or Path()
        went_on = f"goes on after step {run.first_step}" if run.first_step else "begins"
        self._event(
            "start", f"the run {went_on}, on {run.world_size} rank{'s' * (run.world_size > 1)}", "good"
        )

    def on_metrics(self, report: MetricsReport) -> None:
        """Compare the metrics of a step with all rules; queue the alerts."""
        held = self.judge(report)
        if held:
            self.later(self.hold, (report.step, held))

    def judge(self, report: MetricsReport) -> dict[int, list[Held]]:
        """Return for each rule what it holds for in a step, and update baselines."""
        held = defaultdict[int, list[Held]](list)
        loss = report.values.get("loss", 0.0)
        of_loss = [] if math.isfinite(loss) else self._rules("loss", report.metrics.get("loss"))
        for name, value in report.values.items():
            metric, baseline = report.metrics.get(name), None
            fitting = self._rules(name, metric)
            # Of a loss that is no number, rules for all metrics tell that alone.
            if of_loss and name != "loss":
                fitting = [each for each in fitting if each not in of_loss]
            if fitting and metric is not None and metric.rule is not None and is_relative(metric.rule):
                baseline = self.baselines.setdefault(name, Baseline()).update(value, metric.rule)
            for number, rule in fitting:
                said = verdict(rule, name, value, metric, baseline)
                times = self.in_a_row[number, name] = self.in_a_row.get((number, name), 0) + 1 if said else 0
                if said and times >= rule.in_a_row:
                    for_steps = f", {times} in a row" if rule.in_a_row > 1 else ""
                    group = metric.name if metric else name
                    held[number].append(Held(name, group, f"{said[0]}{for_steps}", said[1], value))
        return held

    def hold(self, found: tuple[int, dict[int, list[Held]]]) -> None:
        """Tell what rules hold for in a step."""
        self.step, held = found
        self.pending += ((self.step, number, each) for number, each in held.items())
        self._send()

    def _send(self) -> None:
        """Tell what is pending. If the run has failed, that is told first: each delivery may take a while."""
        while self.pending and not self.failed:
            self._tell(*self.pending.popleft())

    def on_end(self, report: EndReport) -> None:
        """Let the end of a run that failed be told before the alerts that wait."""
        self.failed = report.reason == "failed"
        super().on_end(report)

    def rolled_back(self, report: RollbackReport) -> None:
        """Tell that the run went back."""
        self.step = report.step
        went = f"rolled back from step {report.step} to step {report.restored}"
        self._event("rollback", f"{went}: {report.reason}", "warn")

    def meta(self) -> dict[str, Any]:
        """Return the baselines, and for how many logged steps each rule has held for each metric."""
        rules = self.config.rules
        rows = [
            [*watched(rules[number]), name, times] for (number, name), times in self.in_a_row.items() if times
        ]
        return {
            "baselines": {name: attrs.asdict(each) for name, each in self.baselines.items()},
            "in_a_row": rows,
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it, after a rollback too; a rule that the recipe no longer has is forgotten."""
        self.baselines = {name: Baseline(**each) for name, each in meta["baselines"].items()}
        self.in_a_row = {
            (number, name): times
            for number, rule in enumerate(self.config.rules)
            for *what, name, times in meta["in_a_row"]
            if what == watched(rule)
        }

    def on_save_failed(self, report: FailedSaveReport) -> None:
        """Queue a failed save."""
        self.later(self.save_failed, report, must=True)

    def save_failed(self, report: FailedSaveReport) -> None:
        """Tell that a checkpoint is missing."""
        times = f", {report.in_a_row} in a row" if report.in_a_row > 1 else ""
        text = f"the checkpoint of step {report.step} could not be saved{times}: {report.problem}"
        self._event("save_failed", text, "bad")

    def finish(self, report: EndReport) -> None:
        """Tell how it ended."""
        self.step = report.step
        if report.reason == "failed":
            self._event("failed", f"the run failed after step {report.step}", "bad")
        else:
            self._event("end", f"the run ended after step {report.step}: {report.reason}", "good")
        self.failed = False
        self._send()

    def _event(self, event: str, text: str, level: str) -> None:
        for number, rule in enumerate(self.config.rules):
            if rule.event == event:
                self._tell(self.step, number, [Held(event, event, text, level)])

    def _rules(self, name: str, metric: Metric | None) -> list[tuple[int, AlertRule]]:
        """Return the rules that fit a metric's name, remembered by name."""
        if name not in self.fitting:
            rules = enumerate(self.config.rules)
            self.fitting[name] = [each for each in rules if fnmatchcase(name, each[1].metric)]
            for number, rule in self.fitting[name]:
                judged = rule.above is not None or rule.below is not None or (metric and metric.rule)
                if rule.metric == name and not judged and self.queue is not None:  # one rank says so
                    text = "a rule never holds: the metric declares none, so give it `above` or `below`"
                    self.log.warning(text, metric=name, key=f"rules.{number}")
        return self.fitting[name]

    def _tell(self, step: int, number: int, held: list[Held]) -> None:
        """Send one alert of a rule in a step, of the worst that is due, with the number of the others."""
        rule, now = self.config.rules[number], self.clock()
        states = {each.group: self.states.setdefault((number, each.group), State()) for each in held}
        due = {group for group, x in states.items() if now - x.sent >= self.config.every_minutes * 60}
        for group in states.keys() - due:
            states[group].left_out += 1
        if not due:
            return
        told = [each for each in held if each.group in due]
        worst = next((each for each in told if each.level == "bad"), told[0])
        said = f"{rule.text}: {worst.text}" if rule.text else worst.text
        more = f"; and {len(told) - 1} more" if len(told) > 1 else ""
        alert = Alert(
            run=self.name,
            step=step,
            level=worst.level,
            text=f"{self.name}, step {step}: {said}{more}",
            event=rule.event or "",
            metric="" if rule.event else worst.name,
            value=worst.value,
            left_out=sum(states[group].left_out for group in due),
            time=time.time(),
        )
        for group in due:
            states[group].sent, states[group].left_out = now, 0
        say = self.log.info if worst.level == "good" else self.log.warning
        say(f"alert: {alert.text}")
        for problem in deliver(alert, rule.to or self.config.to, self.folder):
            self.log.warning("an alert could not be delivered", problem=problem)


def watched(rule: AlertRule) -> list[Any]:
    """Return for which values a rule holds, as JSON: neither whom it tells, a secret, nor its place."""
    return [rule.metric, rule.above, rule.below, rule.verdict]


def verdict(
    rule: AlertRule, name: str, value: float, metric: Metric | None, baseline: float | None = None
) -> tuple[str, str] | None:
    """Return (sentence, level) if the rule holds for a value, otherwise None."""
    if rule.above is None and rule.below is None:
        declared = metric.rule if metric else None
        found = declared.judge(value, baseline) if declared else "good"
        if declared is None or found == "good" or (found, rule.verdict) == ("warn", "bad"):
            return None
        where = "" if metric is None else metric.varying(name)
        return declared.say(name, value, baseline=baseline, where=where), found
    unit = f" {metric.unit}" if metric and metric.unit != "1" else ""
    said = f"{name} is {value:.4g}{unit}"
    if rule.above is not None and not value <= rule.above:
        return f"{said}, above {rule.above:g}", "bad"
    if rule.below is not None and not value >= rule.below:
        return f"{said}, below {rule.below:g}", "bad"
    return None
