"""Where metrics left what their declared rules call good, as stretches of steps with one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import numpy as np

from nanotrain_core.api import Rule, Usual, Verdict, is_relative
from nanotrain_report.families import Family, Line, Values
from nanotrain_report.number_format import capital

#: Logged steps that a stretch may be good in between and still be one.
FORGIVEN = 2

Side = Literal["low", "high"]
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
    usual: float
    """What it was before, of a rule about that; NaN of others."""
    sentence: str
    goes_on: bool
    """Whether the newest value is one of them."""


def judge(rule: Rule, values: Values, usual: Values) -> tuple[Marks, Marks]:
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
                marks[values > times * usual] = level
    marks[np.isnan(values)] = 2
    return marks, low


def usual_before(values: Values) -> Values:
    """Return for each value the median of the finite ones before it; NaN where too few are known."""
    usual = Usual()
    found = (usual.before(value) for value in values.tolist())
    return np.array([np.nan if each is None else each for each in found], dtype=np.float64)


def stretches(family: Family) -> list[Stretch]:
    """Return the stretches of a family; none without a rule. Those of several curves that overlap are one."""
    rule = family.metric.rule
    if rule is None:
        return []
    ruled = [line for line in family.lines if family.placeholders != ("over",) or line.label == "max"]
    found = [each for line in ruled for each in _of_line(rule, line)]
    together: list[Stretch] = []
    for each in sorted(found, key=lambda one: (one.side, one.first)):
        if together and together[-1].side == each.side and each.first <= together[-1].last + 1:
            together[-1] = _joined(together[-1], each)
        else:
            together.append(each)
    labels = {line.name: line.label for line in family.lines}
    return [_said(rule, each, labels) for each in together]


def _of_line(rule: Rule, line: Line) -> Iterator[Stretch]:
    usual = usual_before(line.values) if is_relative(rule) else np.full(len(line.values), np.nan)
    marks, low = judge(rule, line.values, usual)
    for side in ("low", "high"):
        (places,) = np.nonzero((marks > 0) & (low == (side == "low")))
        if not len(places):
            continue
        for part in np.split(places, np.nonzero(np.diff(places) > FORGIVEN + 1)[0] + 1):
            worst = part[_furthest(line.values[part], side)]
            yield Stretch(
                names=(line.name,),
                verdict="bad" if marks[part].max() == 2 else "warn",
                side="low" if side == "low" else "high",
                first=int(line.steps[part[0]]),
                last=int(line.steps[part[-1]]),
                count=len(part),
                worst=float(line.values[worst]),
                usual=float(usual[worst]),
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
    usual = None if np.isnan(found.usual) else found.usual
    text = rule.say(name, found.worst, usual=usual, where=labels[name] + more)
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
