"""Diagnosis: evaluates the declared rules of all metrics, those of other monitors included.

A trouble is a declared metric whose values are too low, too high or NaN; for a metric of each layer there is
one trouble for all layers. A trouble begins once it has been present for some logged steps, and ends once it
has been absent for some, so that a value that hovers at its limit does not produce a stream of messages. Its
beginning and its end are each reported once, as a sentence.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import attrs
import structlog

from nanotrain_core.api import Baseline, Metric, Rule, is_judged, is_relative, required_patience, step_kind
from nanotrain_core.api.torch import MetricsReport

Side = Literal["low", "high"]

#: Steps after which no value of a metric is waited for.
GIVEN_UP = 20
#: Sets of names whose rules are kept: those of a step in which tensors are read, of an evaluation.
MOST_KEPT = 64


@attrs.define
class Trouble:
    """A problem that has been reported, or has not lasted long enough to be."""

    metric: str
    """As declared: ``attention/max_logit/{block}``."""
    side: Side
    seen: int = 0
    """Consecutive logged steps in which it was present; once it is reported, in which it was absent."""
    said: bool = False
    what: str = ""
    """The sentence that reported it, without the advice."""
    since: int = 0
    """The step at which it was reported."""
    counted: int = 0
    """The step that was last counted."""


@attrs.define(frozen=True)
class Said:
    """A sentence about a trouble that begins or ends."""

    text: str
    """The sentence, which starts with the step."""
    over: bool = False
    """Whether a trouble has ended: no warning."""


class Diagnosis:
    """Judges metric reports. They are the same on every rank, and so are the resulting sentences."""

    def __init__(self, patience: int) -> None:
        """``patience``: logged steps for which a value must be worth a warning."""
        self.patience = patience
        self.troubles: dict[tuple[str, Side], Trouble] = {}
        self.baselines: dict[str, Baseline] = {}
        """Of metrics whose rule is relative to their baseline."""
        self._with_rules: dict[tuple[str, ...], list[tuple[str, Metric, Rule]]] = {}
        """By the names of a report: those with a rule, in order. Most reports have the names of an earlier
        one."""

    def judge(self, report: MetricsReport) -> list[Said]:
        """Judge a report; return sentences about the troubles that begin or end with it."""
        kind = step_kind(report.values)
        judged = [
            (name, metric, rule, value)
            for name, metric, rule in self._rules_of(report.metrics)
            if (value := report.values.get(name)) is not None and is_judged(metric, kind)
        ]
        wrong: dict[tuple[str, Side], list[Found]] = defaultdict(list)
        for name, metric, rule, value in judged:
            baseline = None
            if is_relative(rule):
                baseline = self.baselines.setdefault(name, Baseline()).update(value, rule)
            verdict = rule.judge(value, baseline)
            if verdict != "good":
                side: Side = "low" if _is_low(rule, value) else "high"
                rank = report.values.get(f"{name.rpartition('/')[0]}/rank") if name.endswith("/max") else None
                bad = verdict == "bad"
                wrong[metric.name, side].append(Found(name, metric, rule, value, baseline, bad, rank))
        begun = [text for key, found in wrong.items() if (text := self._there(key, found, report.step))]
        declared = {metric.name for _, metric, _, _ in judged}
        over = [
            self._gone(trouble, report.step)
            for key, trouble in list(self.troubles.items())
            if key not in wrong and trouble.metric in declared
        ]
        return [
            *(Said(f"step {report.step}: {text}.") for text in begun),
            *(Said(text, over=True) for text in over if text),
        ]

    def _rules_of(self, metrics: Mapping[str, Metric]) -> list[tuple[str, Metric, Rule]]:
        """Return the metrics of a report that have a rule, in an order that is the same on every rank."""
        names = tuple(metrics)
        found = self._with_rules.get(names)
        if found is None:
            if len(self._with_rules) == MOST_KEPT:
                self._with_rules.clear()
            rules = [
                (name, metric, metric.rule) for name, metric in metrics.items() if metric.rule is not None
            ]
            found = self._with_rules[names] = sorted(rules, key=itemgetter(0))
        return found

    def _there(self, key: tuple[str, Side], found: Sequence[Found], step: int) -> str:
        """Count a trouble that is present; return its sentence if it now lasts long enough, else ``""``."""
        trouble = self.troubles.setdefault(key, Trouble(*key))
        if trouble.said:
            trouble.seen = 0
            return ""
        trouble.seen, trouble.counted = trouble.seen + 1, step
        worst = max(found, key=lambda each: (each.bad, each.distance))
        if trouble.seen < required_patience(worst.value, self.patience, bad=worst.bad):
            return ""
        trouble.said, trouble.seen = True, 0
        sentence = worst.sentence(len(found) - 1)
        trouble.what, trouble.since = re.split(r"[:;] ", sentence, maxsplit=1)[0], step
        return sentence

    def _gone(self, trouble: Trouble, step: int) -> str:
        """Count a trouble that is absent; return a sentence if it is now over, else ``""``."""
        if not trouble.said:
            del self.troubles[trouble.metric, trouble.side]
            return ""
        trouble.seen, trouble.counted = trouble.seen + 1, step
        if trouble.seen < self.patience:
            return ""
        del self.troubles[trouble.metric, trouble.side]
        return f"step {step}: this is over: {trouble.what} (said at step {trouble.since})."

    def undecided(self, metrics: Collection[str], step: int) -> bool:
        """Return whether more values are needed of one of these, as declared: it is outside its rule and not
        yet reported, or within it again and not yet reported as over.

        A metric that has had no value for some steps up to ``step`` is given up.
        """
        return any(
            trouble.seen and trouble.metric in metrics and step - trouble.counted <= GIVEN_UP
            for trouble in self.troubles.values()
        )

    def log(self, said: Sequence[Said], step: int, *, shown: bool) -> None:
        """Warn of what begins, and note what is over, on one rank."""
        log = structlog.get_logger("nanotrain.health")
        for each in said if shown else ():
            (log.info if each.over else log.warning)(each.text, at=step)

    def meta(self) -> dict[str, Any]:
        """Return what lasts, and the baselines."""
        return {
            "troubles": [attrs.asdict(each) for each in self.troubles.values()],
            "baselines": {name: attrs.asdict(baseline) for name, baseline in self.baselines.items()},
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it."""
        troubles = [Trouble(**each) for each in meta["troubles"]]
        self.troubles = {(each.metric, each.side): each for each in troubles}
        self.baselines = {name: Baseline(**each) for name, each in meta["baselines"].items()}


@attrs.define(frozen=True)
class Found:
    """A value that is not good."""

    name: str
    metric: Metric
    rule: Rule
    value: float
    baseline: float | None
    bad: bool
    rank: float | None = None
    """For a per-rank metric, the rank with the largest value."""

    @property
    def distance(self) -> float:
        """How far it is from good, to tell the worst of several."""
        if math.isnan(self.value):
            return math.inf
        return -self.value if _is_low(self.rule, self.value) else self.value

    def sentence(self, others: int) -> str:
        """Return what is wrong, here and with as many ``others``."""
        where = self.metric.varying(self.name)
        if others:
            where = f"{where} (and {others} more)"
        said = self.rule.say(self.name, self.value, baseline=self.baseline, where=where)
        if others and where not in said:
            said = f"{said} (and {others} more)"
        return said if self.rank is None else f"{said}; most on rank {self.rank:.0f}"


def _is_low(rule: Rule, value: float) -> bool:
    return any(limit is not None and value < limit for limit in (rule.warn_below, rule.bad_below))
