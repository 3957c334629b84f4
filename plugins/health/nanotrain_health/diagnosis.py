"""Diagnosis: the rules of all metrics of a run, those of other monitors included, as sentences.

A trouble is a declared metric whose values are too low, or too high, or no numbers: of a metric of each layer
one trouble for all layers. It begins when it has lasted for some logged steps, and ends when it has not been
there for as many: a value at its limit makes no stream of messages. Each is said once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import attrs
import structlog

from nanotrain_core.api import Metric, Rule, Usual, is_relative
from nanotrain_core.api.torch import MetricsReport

Side = Literal["low", "high"]

#: Logged steps for which something bad must last, if that is less than what is worth a warning.
BAD_LASTS = 2
#: Of gradients that overflow nothing but that is worth a word; a loss scale that is too large makes some.
OF_GRADIENTS = frozenset({"gradients", "updates", "weights"})


@attrs.define
class Trouble:
    """Something that is wrong, or begins to be."""

    metric: str
    """As declared: ``attention/max_logit/{block}``."""
    side: Side
    seen: int = 0
    """Logged steps in a row in which it was there; since it was said, in which it was not."""
    said: bool = False
    what: str = ""
    """What was said when it began, without its advice."""
    since: int = 0
    """The step of that."""


@attrs.define(frozen=True)
class Said:
    """A sentence on what begins or ends."""

    text: str
    """With the step that it begins with."""
    over: bool = False
    """Whether a trouble has ended: no warning."""


class Diagnosis:
    """Judges reports, which are the same on every rank; so is what it says."""

    def __init__(self, patience: int) -> None:
        """``patience``: logged steps for which a value must be worth a warning."""
        self.patience = patience
        self.troubles: dict[tuple[str, Side], Trouble] = {}
        self.history: dict[str, Usual] = {}
        """Values of metrics whose rule is relative to the usual."""

    def judge(self, report: MetricsReport) -> list[Said]:
        """Take a report; return sentences on what begins and what ends with it."""
        judged = [
            (name, metric, metric.rule, value)
            for name, metric in report.metrics.items()
            if metric.rule is not None and (value := report.values.get(name)) is not None
        ]
        judged.sort(key=itemgetter(0))  # alike on every rank
        if not math.isfinite(report.values.get("loss", 0.0)):  # then no other number means anything
            judged = [each for each in judged if each[0] == "loss"]
        if report.values.get("skipped") and report.values.get("loss_scale", 1.0) != 1.0:
            judged = [each for each in judged if each[1].group not in OF_GRADIENTS]
        wrong: dict[tuple[str, Side], list[Found]] = defaultdict(list)
        for name, metric, rule, value in judged:
            usual = self._usual(name, rule, value)
            verdict = rule.judge(value, usual)
            if verdict != "good":
                side: Side = "low" if _is_low(rule, value) else "high"
                rank = report.values.get(f"{name.rpartition('/')[0]}/rank") if name.endswith("/max") else None
                bad = verdict == "bad"
                wrong[metric.name, side].append(Found(name, metric, rule, value, usual, bad, rank))
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

    def _there(self, key: tuple[str, Side], found: Sequence[Found], step: int) -> str:
        """Note a trouble; return what it says if it has just lasted long enough."""
        trouble = self.troubles.setdefault(key, Trouble(*key))
        if trouble.said:
            trouble.seen = 0
            return ""
        trouble.seen += 1
        worst = max(found, key=lambda each: (each.bad, each.distance))
        lasts = min(BAD_LASTS, self.patience) if worst.bad else self.patience
        if not math.isfinite(worst.value):
            lasts = 1
        if trouble.seen < lasts:
            return ""
        trouble.said, trouble.seen = True, 0
        sentence = worst.sentence(len(found) - 1)
        trouble.what, trouble.since = re.split(r"[:;] ", sentence, maxsplit=1)[0], step
        return sentence

    def _gone(self, trouble: Trouble, step: int) -> str:
        """Note that a trouble is not there; return that it is over if it has not been for long enough."""
        if not trouble.said:
            del self.troubles[trouble.metric, trouble.side]
            return ""
        trouble.seen += 1
        if trouble.seen < self.patience:
            return ""
        del self.troubles[trouble.metric, trouble.side]
        # Checkpoints of earlier versions have no words.
        what = trouble.what or f"{trouble.metric} is too {trouble.side}"
        return f"step {step}: this is over: {what} (said at step {trouble.since})."

    def _usual(self, name: str, rule: Rule, value: float) -> float | None:
        """Return the median of a metric's values before, if its rule asks for it, and remember this one."""
        return self.history.setdefault(name, Usual()).before(value) if is_relative(rule) else None

    def log(self, said: Sequence[Said], step: int, *, shown: bool) -> None:
        """Warn of what begins, and note what is over, on one rank."""
        log = structlog.get_logger("nanotrain.health")
        for each in said if shown else ():
            (log.info if each.over else log.warning)(each.text, at=step)

    def meta(self) -> dict[str, Any]:
        """Return what lasts, and what is usual."""
        return {
            "troubles": [attrs.asdict(each) for each in self.troubles.values()],
            "history": {name: list(usual.values) for name, usual in self.history.items()},
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it."""
        troubles = [Trouble(**each) for each in meta["troubles"]]
        self.troubles = {(each.metric, each.side): each for each in troubles}
        self.history = {name: Usual(values) for name, values in meta["history"].items()}


@attrs.define(frozen=True)
class Found:
    """A value that is not good."""

    name: str
    metric: Metric
    rule: Rule
    value: float
    usual: float | None
    bad: bool
    rank: float | None = None
    """Of a number that each rank has, the rank with the largest."""

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
        said = self.rule.say(self.name, self.value, usual=self.usual, where=where)
        return said if self.rank is None else f"{said}; most on rank {self.rank:.0f}"


def _is_low(rule: Rule, value: float) -> bool:
    return any(limit is not None and value < limit for limit in (rule.warn_below, rule.bad_below))
