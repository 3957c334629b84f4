"""Curves put together by their declarations: ``gradients/norm/{parameter}`` is one family of many curves.

Charts depend on declarations (group, unit, rule, placeholders), not on a list of names, so that metrics which
are unknown to this package are drawn in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from nanotrain_core.api import Curve, Metric, MetricNames

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

#: Statistics of a per-rank metric: base/max and so on are one family, ``base/{over}``.
OVER = ("max", "mean", "median", "rank")
#: The group of what nobody declared.
UNDECLARED = "undeclared"


@attrs.define(frozen=True, eq=False)
class Line:
    """One curve as arrays."""

    name: str
    """The metric's whole name."""
    label: str
    """What varies in its family: ``layers.0.attn.q.weight``; the whole name where nothing does."""
    steps: Steps
    values: Values

    @property
    def last(self) -> float:
        """The newest value that is a number; NaN if there is none."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if len(finite) else float("nan")


@attrs.define(frozen=True, eq=False)
class Family:
    """The curves of one declaration, in natural order: layer 2 before layer 10."""

    metric: Metric
    lines: tuple[Line, ...]
    others: tuple[Line, ...] = ()
    """Curves that belong to it and are not drawn: which rank has the largest value, the median."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What varies: ``("parameter",)``; none of a single curve."""
        return tuple(re.findall(r"\{(\w+)\}", self.metric.name))

    @property
    def title(self) -> str:
        """The declared name without the placeholders at its end: ``gradients/norm``."""
        return re.sub(r"([/.]?\{\w+\})+$", "", self.metric.name)


def as_arrays(curve: Curve) -> tuple[Steps, Values]:
    """Return a copy of a curve's steps and values."""
    return np.array(curve.steps, dtype=np.int64), np.array(curve.values, dtype=np.float64)


def families(curves: Mapping[str, Curve], declared: Iterable[Metric]) -> list[Family]:
    """Return every curve in the family of its declaration, families in the order of declarations.

    Names that nobody declared form a family with those that differ in the last word only.
    """
    metrics = tuple(declared)
    names = MetricNames(metrics)
    found: dict[str, tuple[Metric, list[Line]]] = {}
    for name, curve in curves.items():
        metric = _of_statistic(names.find(name) or _undeclared(name), name)
        line = Line(name, _varying(metric.name, name), *as_arrays(curve))
        found.setdefault(metric.name, (metric, []))[1].append(line)
    place = {metric.name: number for number, metric in reversed([*enumerate(metrics)])}
    ordered = sorted(found.values(), key=lambda each: place.get(each[0].name, len(place)))
    grouped = [Family(metric, tuple(sorted(lines, key=_natural))) for metric, lines in ordered]
    return _over_ranks({family.metric.name: family for family in grouped})


def _over_ranks(found: dict[str, Family]) -> list[Family]:
    """Put ``memory/host/max``, ``/mean``, ``/median`` and ``/rank`` together as ``memory/host/{over}``."""
    for name in [*found]:
        base = name.removesuffix("/max")
        parts = {over: found.get(f"{base}/{over}") for over in OVER}
        if base == name or parts["mean"] is None or parts["rank"] is None:
            continue
        most = found[name].metric
        summary = most.summary.removesuffix("; the largest of all ranks")
        lines = [attrs.evolve(f.lines[0], label=over) for over, f in parts.items() if f is not None]
        drawn = tuple(line for line in lines if line.label in ("max", "mean"))
        rest = tuple(line for line in lines if line not in drawn)
        found[name] = Family(attrs.evolve(most, name=f"{base}/{{over}}", summary=summary), drawn, rest)
        for over in OVER[1:]:
            found.pop(f"{base}/{over}", None)
    return [*found.values()]


def _of_statistic(metric: Metric, name: str) -> Metric:
    """Return the declaration of one statistic: norms and means share a name, not a scale."""
    if "{statistic}" not in metric.name:
        return metric
    varying = dict(zip(re.findall(r"\{(\w+)\}", metric.name), _values(metric.name, name), strict=True))
    return attrs.evolve(metric, name=metric.name.replace("{statistic}", varying["statistic"]))


def _undeclared(name: str) -> Metric:
    # Whatever wrote the name may have had other rules for names than a declaration has.
    first, slash, last = name.rpartition("/")
    words = [re.sub(r"[^\w.\-]", "_", word) or "_" for word in (first if slash else last).split("/")]
    pattern = "/".join([*words, "{name}"] if slash else words)
    return Metric(name=pattern, unit="1", group=UNDECLARED, summary="not declared by any installed monitor")


def _varying(pattern: str, name: str) -> str:
    """Return what stands for a pattern's placeholders in ``name``; all of it where nothing does."""
    return " ".join(_values(pattern, name)) or name


def _values(pattern: str, name: str) -> tuple[str, ...]:
    pieces = map(re.escape, re.split(r"\{\w+\}", pattern))
    match = re.fullmatch("([^/]+)".join(pieces), name)
    return match.groups() if match else ()


def _natural(line: Line) -> list[tuple[int, str]]:
    return [
        (int(part or 0), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", line.label)
    ]
