"""Finds, by their declarations, the metrics that are parts of a step's time, and those of ranks' memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from nanotrain_core.api import MetricNames
from nanotrain_report.families import Family, Line
from nanotrain_report.folder import RunFolder

#: Last words of names that say something of the whole step, not of a part of it.
WHOLE = re.compile(r"(^|[/_])(step|seconds|total|p\d\d|median|mean|max|min|wall|skew|eta)$")
#: Those of things that happen between steps.
BETWEEN = re.compile(r"checkpoint|evaluation|eval|save|restart")
#: What parts may exceed the step by, rounding and different clocks included, and still be its parts.
SLACK = 1.15


def step_parts(run: RunFolder) -> list[Line]:
    """Return the seconds that a step spends on each thing, and ``other`` for the rest.

    They are the metrics declared in the group ``time`` in seconds, except those whose names are of statistics
    of whole steps, or of single ranks. If they add up to more than a step, maxima over ranks are left out,
    since they may be of different ranks. If the rest still adds up to more, parts overlap, and the list is
    empty.
    """
    seconds = run.line("seconds")
    if seconds is None:
        return []
    found = [
        (line, family.metric.reduce)
        for family in run.families
        if is_part(family)
        for line in family.lines
        if not BETWEEN.search(line.name) and not WHOLE.search(line.name) and np.isfinite(line.values).any()
    ]
    usual = float(np.nanmedian(seconds.values))
    parts = [attrs.evolve(line, label=plain(line.name)) for line, _ in found]
    if _total(parts) > SLACK * usual:
        parts = [part for part, (_, reduce) in zip(parts, found, strict=True) if reduce != "max"]
    total = _total(parts)
    if not parts or total > SLACK * usual:
        return []
    if total < 0.97 * usual:
        known = sum(np.nan_to_num(np.interp(seconds.steps, part.steps, part.values)) for part in parts)
        rest = np.clip(seconds.values - known, 0, None)
        parts.append(Line("other", "other", seconds.steps, rest))
    return parts


def _total(parts: Sequence[Line]) -> float:
    return sum(float(np.nanmedian(part.values)) for part in parts)


def is_part(family: Family) -> bool:
    """Return whether a family may hold parts of a step."""
    metric = family.metric
    return (
        metric.group == "time"
        and metric.unit == "s"
        and metric.name != "seconds"
        and "rank" not in metric.name
    )


def shares_of_time(run: RunFolder) -> list[Line]:
    """Return goodput and what the rest of the time went into, as shares of it; none if it is not told."""
    good = run.line("goodput")
    lost = [line for name, line in run.lines.items() if name.startswith("lost/") and line.values.any()]
    parts = [good, *lost] if good is not None and lost else []
    return [attrs.evolve(line, label=plain(line.name).replace("goodput", "training")) for line in parts]


def plain(name: str) -> str:
    """Return the last word of a metric's name as people write it: ``forward backward``."""
    return name.rpartition("/")[2].replace("_", " ").removesuffix(" seconds")


@attrs.define(frozen=True)
class RankMemory:
    """The memory of the fullest rank, and of the others as far as it is recorded."""

    name: str
    """Name of the metric, without the rank."""
    unit: str
    fullest: str
    """The rank, as ``3``."""
    peak: float
    mean: float
    """Over ranks."""
    share: float | None
    """The largest share of its device that a rank has used; None if that is not known."""
    on_host: bool = False
    """Whether it is the host's memory, which ranks and other programs share."""
    ranks: Sequence[tuple[str, float, float]] = ()
    """For each rank (number, newest value, peak); empty if these are not recorded."""
    step: int = 0
    """Step of the newest values."""


def memory_of_ranks(run: RunFolder) -> RankMemory | None:
    """Return the memory of ranks, from a family of group ``memory`` with per-rank values; None without one.

    A family with a value of every rank is preferred, and among these one with ``peak`` in its name.
    """
    told = [f for f in run.families if f.metric.group == "memory" and _is_size(f.metric.unit)]
    apart = [f for f in told if f.placeholders == ("rank",)] or [
        f for f in told if f.placeholders == ("over",)
    ]
    if not apart:
        return None
    family = next((f for f in apart if "peak" in f.metric.name), apart[0])
    unit, name = family.metric.unit, family.title
    known = partial(RankMemory, name=name, unit=unit, share=_share(run, name), on_host="host" in name)
    if family.placeholders == ("over",):
        lines = {line.label: line for line in (*family.lines, *family.others)}
        return known(
            fullest=f"{lines['rank'].last:.0f}",
            peak=float(np.nanmax(lines["max"].values)),
            mean=lines["mean"].last,
            **(of_every_rank(run) if "peak" in family.metric.name else {}),
        )
    ranks = [(_number(line), line.last, float(np.nanmax(line.values))) for line in family.lines]
    fullest, _, peak = max(ranks, key=lambda each: each[2])
    mean = float(np.mean([most for _, _, most in ranks]))
    step = int(family.lines[0].steps[-1])
    return known(fullest=fullest, peak=peak, mean=mean, ranks=ranks, step=step)


def of_every_rank(run: RunFolder) -> dict[str, Any]:
    """Return ``ranks`` and ``step`` of :class:`RankMemory`, where a histogram of ranks tells them."""
    for name in rank_histograms(run):
        rows = run.history.histograms[name]
        held = np.array([found.counts for _, found in rows if found.edges == rows[-1][1].edges])
        ranks = [(str(rank), float(now), float(held[:, rank].max())) for rank, now in enumerate(held[-1])]
        return {"ranks": ranks, "step": rows[-1][0]}
    return {}


def rank_histograms(run: RunFolder) -> list[str]:
    """Return the histograms of the group ``memory`` whose bins are ranks: their edges count."""
    declared, world = MetricNames(run.declared), run.history.start.get("world_size") or 0
    return [
        name
        for name, rows in run.history.histograms.items()
        if (metric := declared.find(name)) is not None and metric.group == "memory"
        if len(rows[-1][1].counts) == world and rows[-1][1].edges == tuple(map(float, range(world + 1)))
    ]


def _is_size(unit: str) -> bool:
    return unit == "bytes" or re.fullmatch("[kKMGT]?i?B", unit) is not None


def _number(line: Line) -> str:
    return re.sub(r"\D+", "", line.label) or line.label


def _share(run: RunFolder, name: str) -> float | None:
    """Return the largest fraction that is told of the same memory: ``memory/reserved_fraction`` of
    ``memory/reserved_peak``. That of a host is of all its programs, and no rank's."""
    leaf = name.rpartition("/")[2].partition("_")[0]
    if leaf == "host":
        return None
    of_same = [
        line.values
        for family in run.families
        if family.metric.group == "memory" and family.metric.unit == "1" and "fraction" in family.metric.name
        if leaf in family.metric.name or family.title == "memory/fraction"
        for line in family.lines
    ]
    finite = [float(np.nanmax(values)) for values in of_same if np.isfinite(values).any()]
    return max(finite) if finite else None
