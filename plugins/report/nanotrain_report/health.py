"""Where metrics left what their declared rules call good, as stretches of steps with one sentence each.

As the monitor ``health`` does, it passes over values that come and go, and over gradients of a step that was
skipped to halve the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from nanotrain_core.api import (
    PATIENCE,
    Baseline,
    Curve,
    Metric,
    Rule,
    StepKind,
    Verdict,
    is_judged,
    is_relative,
    required_patience,
    step_kind,
)
from nanotrain_report.families import Family, Line, Steps, Values
from nanotrain_report.number_format import capital

#: Logged steps that a stretch may be good in between and still be one.
FORGIVEN = 2

Side = Literal["low", "high"]
SIDES: tuple[Side, ...] = ("high", "low")
Marks = np.ndarray[tuple[int], np.dtype[np.int64]]


@attrs.define(frozen=True)
class Stretch:
    """A range of steps in which one metric, or several of one declaration, were not good by their rule."""

    names: tuple[str, ...]
    verdict: Verdict
    """The worst of them."""
    side: Side
    first: int
    last: int
    count: int
    """Logged values among them that were not good."""
    worst: float
    """The value furthest out; NaN if one was no number."""
    baseline: float
    """What it was before, of a rule about that; NaN of others."""
    sentence: str
    goes_on: bool
    """Whether the newest value is one of them."""


@attrs.define(frozen=True, eq=False, slots=False)
class Judging:
    """What of a run, or of the steps that it gave up, is judged."""

    curves: Mapping[str, Curve] = attrs.field(factory=dict)
    """``loss``, ``skipped`` and ``loss_scale`` are read."""
    patience: int = PATIENCE
    """Consecutive logged steps outside a rule that are worth a warning."""

    @cached_property
    def kinds(self) -> Mapping[StepKind, Steps]:
        """The steps of each kind, ascending."""
        values, found = dict[int, dict[str, float]](), dict[StepKind, list[int]]()
        for name in ("loss", "skipped", "loss_scale"):
            for step, value in self.curves.get(name, ()):
                values.setdefault(step, {})[name] = value
        for step in sorted(values):
            found.setdefault(step_kind(values[step]), []).append(step)
        return {kind: np.array(steps, dtype=np.int64) for kind, steps in found.items()}

    def judged(self, metric: Metric, line: Line) -> Line:
        """Return a curve without the steps in which its metric is not judged."""
        for kind, steps in self.kinds.items():
            if not is_judged(metric, kind):
                kept = ~np.isin(line.steps, steps)
                line = attrs.evolve(line, steps=line.steps[kept], values=line.values[kept])
        return line


def judge(rule: Rule, values: Values, baseline: Values) -> tuple[Marks, Marks]:
    """Return for each value 0, 1 or 2 (good, warn, bad), and whether it is low: as ``Rule.judge`` says."""
    marks, low = np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        for level, below, above, times in (
            (1, rule.warn_below, rule.warn_above, rule.warn_times),
            (2, rule.bad_below, rule.bad_above, rule.bad_times),
        ):
            if below is not None:
                marks[values < below] = level
                low[values < below] = 1
            if above is not None:
                marks[values > above] = level
            if times is not None:
                marks[values > times * baseline] = level
    marks[~np.isfinite(values)] = 2
    return marks, low


def baselines(rule: Rule, values: Values) -> Values:
    """Return for each value the median of the good ones before it; NaN where too few are known."""
    baseline = Baseline()
    found = (baseline.update(value, rule) for value in values.tolist())
    return np.array([np.nan if each is None else each for each in found], dtype=np.float64)


def stretches(family: Family, judging: Judging) -> list[Stretch]:
    """Return the stretches of a family; none without a rule. Those of several curves that overlap are one.

    One is left out in which values never were outside for as many logged steps in a row as a report takes.
    """
    rule = family.metric.rule
    if rule is None:
        return []
    ruled = [line for line in family.lines if family.placeholders != ("over",) or line.label == "max"]
    marked = [_marked(rule, judging.judged(family.metric, line)) for line in ruled]
    together: list[Stretch] = []
    for side in SIDES:
        found = sorted((s for each in marked for s in _of_line(each, side)), key=lambda one: one.first)
        joined: list[Stretch] = []
        for each in found:
            if joined and each.first <= joined[-1].last + 1:
                joined[-1] = _joined(joined[-1], each)
            else:
                joined.append(each)
        said = _reported(marked, side, judging.patience)
        together += [each for each in joined if ((said >= each.first) & (said <= each.last)).any()]
    labels = {line.name: line.label for line in family.lines}
    return [_said(rule, each, labels) for each in together]


@attrs.define(frozen=True, eq=False)
class Marked:
    """The values of one curve, judged."""

    line: Line
    baseline: Values
    marks: Marks
    low: Marks

    def places(self, side: Side) -> NDArray[np.intp]:
        """Return where the values are that are outside on this side."""
        return np.nonzero((self.marks > 0) & (self.low == (side == "low")))[0]


def _marked(rule: Rule, line: Line) -> Marked:
    baseline = baselines(rule, line.values) if is_relative(rule) else np.full(len(line.values), np.nan)
    return Marked(line, baseline, *judge(rule, line.values, baseline))


def _reported(marked: Sequence[Marked], side: Side, patience: int) -> Steps:
    """Return the steps until which a family was outside for as many in a row as the worst value takes."""
    steps = np.unique(np.concatenate([each.line.steps for each in marked]))
    needed = np.full(len(steps), np.inf)
    for each in marked:
        places = each.places(side)
        values, marks = each.line.values[places], each.marks[places]
        lasts = np.where(
            marks == 2,
            required_patience(0.0, patience, bad=True),
            required_patience(0.0, patience, bad=False),
        )
        lasts = np.where(np.isfinite(values), lasts, required_patience(np.nan, patience, bad=True))
        np.minimum.at(needed, np.searchsorted(steps, each.line.steps[places]), lasts)
    number = np.arange(len(steps))
    in_a_row = number - np.maximum.accumulate(np.where(np.isinf(needed), number, -1))
    return steps[in_a_row >= needed]


def _of_line(marked: Marked, side: Side) -> Iterator[Stretch]:
    line, places = marked.line, marked.places(side)
    for part in np.split(places, np.nonzero(np.diff(places) > FORGIVEN + 1)[0] + 1) if len(places) else ():
        worst = part[_furthest(line.values[part], side)]
        yield Stretch(
            names=(line.name,),
            verdict="bad" if marked.marks[part].max() == 2 else "warn",
            side=side,
            first=int(line.steps[part[0]]),
            last=int(line.steps[part[-1]]),
            count=len(part),
            worst=float(line.values[worst]),
            baseline=float(marked.baseline[worst]),
            sentence="",
            goes_on=bool(part[-1] == len(line.values) - 1),
        )


def _furthest(values: Values, side: str) -> int:
    """Return the place of the value that is furthest out: of the first that is no number, if there is one."""
    if np.isnan(values).any():
        return int(np.argmax(np.isnan(values)))
    return int(values.argmin() if side == "low" else values.argmax())


def _joined(one: Stretch, other: Stretch) -> Stretch:
    """Return two stretches that overlap as one, named after the worse."""
    pair = (one, other)
    worse = pair[_furthest(np.array([one.worst, other.worst]), one.side)]
    rest = other if worse is one else one
    return attrs.evolve(
        worse,
        names=tuple(dict.fromkeys((*worse.names, *rest.names))),
        verdict="bad" if "bad" in (one.verdict, other.verdict) else "warn",
        first=min(one.first, other.first),
        last=max(one.last, other.last),
        count=one.count + other.count,
        goes_on=one.goes_on or other.goes_on,
    )


def _said(rule: Rule, found: Stretch, labels: dict[str, str]) -> Stretch:
    more = f" (and {len(found.names) - 1} more)" if len(found.names) > 1 else ""
    name = found.names[0]
    baseline = None if np.isnan(found.baseline) else found.baseline
    text = rule.say(name, found.worst, baseline=baseline, where=labels[name] + more)
    if more and more not in text:
        text += more
    return attrs.evolve(found, sentence=capital(text, name, labels[name]))


def told(texts: Sequence[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Return (first step, last step, text) of equal texts in a row."""
    found: list[tuple[int, int, str]] = []
    for step, text in texts:
        if found and found[-1][2] == text:
            found[-1] = (found[-1][0], step, text)
        else:
            found.append((step, step, text))
    return found
