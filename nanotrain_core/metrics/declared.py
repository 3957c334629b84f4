"""Declarations of metrics: name, unit, meaning, reduction over ranks, cost, and thresholds.
Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, get_args

import attrs
from attrs.validators import in_, instance_of, optional

from nanotrain_core.errors import PluginError, did_you_mean

Kind = Literal["scalar", "histogram", "text"]
Reduce = Literal["sum", "mean", "max", "min", "last"]
Level = Literal["minimal", "standard", "debug"]
#: What a metric costs: nothing, since the host has the number anyway; a number that the device has anyway,
#: which travels in the one reduction of a logged step; in logged steps a few kernels at each watched module;
#: in logged steps a pass over all weights, gradients or optimizer state.
Cost = Literal["host", "device", "layers", "weights"]
#: A :class:`Rule`'s verdict on a value.
Verdict = Literal["good", "warn", "bad"]
#: Statistics of a tensor that can be published; ``{statistic}`` in a name stands for one of them.
Statistic = Literal["norm", "rms", "mean", "std", "max_abs", "nonfinite"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)

#: Reported for a per-rank value: the largest, the mean, the lower median, and the rank with the largest.
OVER = ("max", "mean", "median", "rank")

#: A number, or none.
_LIMIT = optional(instance_of((int, float)))
_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)*")
_PATTERN = re.compile(r"(?:[\w.\-]|\{\w+\})+(?:/(?:[\w.\-]|\{\w+\})+)*")


@attrs.define(frozen=True, kw_only=True)
class Rule:
    """Thresholds of a metric. NaN and infinity are always bad."""

    warn_below: float | None = attrs.field(default=None, validator=_LIMIT)
    bad_below: float | None = attrs.field(default=None, validator=_LIMIT)
    warn_above: float | None = attrs.field(default=None, validator=_LIMIT)
    bad_above: float | None = attrs.field(default=None, validator=_LIMIT)
    warn_times: float | None = attrs.field(default=None, validator=_LIMIT)
    """Warn above this multiple of its baseline, the median of its good values so far in the run."""
    bad_times: float | None = attrs.field(default=None, validator=_LIMIT)
    low: str = attrs.field(default="", validator=instance_of(str))
    """The message for a value that is too low, and what to do about it: one plain sentence. ``{value}``,
    ``{percent}`` and ``{times}`` (relative to the first limit, or the baseline) stand for numbers,
    ``{where}`` for the variable part of the metric's name, such as its layer."""
    high: str = attrs.field(default="", validator=instance_of(str))
    """The same for a value that is too high; of a rule without limits, for NaN and infinity."""

    def judge(self, value: float, baseline: float | None = None) -> Verdict:
        """Return the verdict on ``value``. ``baseline``: the median of earlier good ones, if known.

        >>> [Rule(warn_above=3, bad_above=10).judge(x) for x in (2, 4, 11, float("nan"))]
        ['good', 'warn', 'bad', 'bad']
        >>> Rule().judge(float("inf"))
        'bad'
        >>> [Rule(warn_times=2).judge(x, baseline=10) for x in (19, 21)]
        ['good', 'warn']
        """
        bad = baseline is not None and _outside(value, None, self.bad_times, baseline)
        if bad or not math.isfinite(value) or _outside(value, self.bad_below, self.bad_above):
            return "bad"
        warn = baseline is not None and _outside(value, None, self.warn_times, baseline)
        return "warn" if warn or _outside(value, self.warn_below, self.warn_above) else "good"

    def say(self, name: str, value: float, *, baseline: float | None = None, where: str = "") -> str:
        """Describe what is wrong with ``value``, as a sentence that contains it.

        >>> Rule(warn_above=3, high="the loss is {times} times too large").say("loss", 6.0)
        'the loss is 2 times too large'
        >>> Rule(warn_below=5, low="hurry up").say("speed", 2.5)
        'hurry up (speed is 2.5)'
        >>> Rule(warn_above=3, high="the loss is {times} times too large").say("loss", float("nan"))
        'loss is nan, not a finite number'
        """
        if not math.isfinite(value) and self != Rule(low=self.low, high=self.high):
            return f"{name} is {value}, not a finite number"  # of which no text about sizes is true
        low = _outside(value, self.warn_below, None) or _outside(value, self.bad_below, None)
        limits = (self.warn_below, self.bad_below) if low else (self.warn_above, self.bad_above)
        limit = next((each for each in limits if each is not None), None)
        text = (self.low if low else self.high) or f"{name} is {{value}}: expected otherwise, {self}"
        if not _outside(value, limit if low else None, None if low else limit):
            limit = baseline  # the multiple of that
        pair = (limit, value) if low else (value, limit)
        times = pair[0] / pair[1] if pair[0] is not None and pair[1] else math.inf
        numbers = {"value": f"{value:.3g}", "percent": f"{100 * value:.3g}%", "times": f"{times:.3g}"}
        filled = text
        for word, number in (*numbers.items(), ("where", where or name)):
            filled = filled.replace(f"{{{word}}}", number)
        has_number = any(f"{{{word}}}" in text for word in numbers)
        return filled if has_number else f"{filled} ({name} is {value:.4g})"

    def __str__(self) -> str:
        """Return the limits as text, ``warn above 3, bad above 10``."""
        limits = (
            (f"{name.replace('_', ' ')} {limit:g}", limit)
            for name in ("warn_below", "bad_below", "warn_above", "bad_above")
            if (limit := getattr(self, name)) is not None
        )
        times = (
            f"{name} above {limit:g} times the baseline"
            for name, limit in (("warn", self.warn_times), ("bad", self.bad_times))
            if limit is not None
        )
        return ", ".join([*(text for text, _ in limits), *times])


def _outside(value: float, below: float | None, above: float | None, unit: float = 1.0) -> bool:
    """Return whether a value is outside the limits, which are in ``unit``."""
    return (below is not None and value < below * unit) or (above is not None and value > above * unit)


@attrs.define(frozen=True, kw_only=True)
class Bins:
    """The edges of a histogram, the same on every rank, so that counts can be summed."""

    low: float = attrs.field(validator=instance_of((int, float)))
    high: float = attrs.field(validator=instance_of((int, float)))
    count: int = attrs.field(default=64, validator=instance_of(int))
    """Number of bins between them; values outside, and non-finite ones, are counted too."""
    log: bool = False
    """Equal width in the logarithm of the magnitude: signs are dropped, and ``low`` is above 0."""

    def __attrs_post_init__(self) -> None:
        if not (self.low < self.high and self.count > 0 and (self.low > 0 or not self.log)):
            raise PluginError(f"{self}: expected low < high, count > 0, and of a logarithmic one low > 0")

    @property
    def edges(self) -> tuple[float, ...]:
        """The ``count + 1`` edges, ascending."""
        first, last = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        inner = [first + (last - first) * n / self.count for n in range(1, self.count)]
        return (self.low, *(math.exp(x) if self.log else x for x in inner), self.high)


def _pattern(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _PATTERN.fullmatch(value):
        raise PluginError(
            f"{value!r} is no metric's name; expected words of letters, digits, '_', '-' and '.' between "
            "slashes, with '{word}' for what varies: 'gradients/norm/{parameter}'"
        )


@attrs.define(frozen=True, kw_only=True)
class Metric:
    """The declaration of a metric, known before anything runs."""

    name: str = attrs.field(validator=_pattern)
    """Or a pattern of names: ``gradients/norm/{parameter}``, where ``{parameter}`` is any text without a
    slash."""
    unit: str = attrs.field(validator=instance_of(str))
    """``tokens/s``, ``nats``, ``1`` for a dimensionless number."""
    group: str = attrs.field(validator=instance_of(str))
    """The group it is shown in: ``loss``, ``gradients``, ``memory``."""
    summary: str = attrs.field(validator=instance_of(str))
    """Its meaning, in one line."""
    kind: Kind = attrs.field(default="scalar", validator=in_(get_args(Kind)))
    reduce: Reduce = attrs.field(default="mean", validator=in_(get_args(Reduce)))
    """Reduction over ranks, and over what a rank publishes between two logged steps. ``last`` is the last
    value that a rank published; if ranks differ, the largest."""
    level: Level = attrs.field(default="standard", validator=in_(get_args(Level)))
    cost: Cost = attrs.field(default="host", validator=in_(get_args(Cost)))
    every: int = attrs.field(default=1, validator=instance_of(int))
    """Interval between values, in logged steps, with its monitor's default config."""
    rule: Rule | None = attrs.field(default=None, validator=optional(instance_of(Rule)))
    bins: Bins | None = attrs.field(default=None, validator=optional(instance_of(Bins)))
    """For a histogram. One without is published with its own bins, the same in every step."""

    def __attrs_post_init__(self) -> None:
        if self.bins is not None and self.kind != "histogram":
            raise PluginError(f"metric {self.name}: a histogram has bins, and nothing else has")

    def varying(self, name: str) -> str:
        """Return the parts of a name that this declaration's placeholders stand for; empty without any.

        >>> entropy = Metric(name="attention/entropy/{block}", unit="nats", group="attention", summary="")
        >>> entropy.varying("attention/entropy/layers.3")
        'layers.3'
        """
        pairs = zip(self.name.split("/"), name.split("/"), strict=False)
        return " ".join(word for declared, word in pairs if "{" in declared)


def rank_metrics(name: str, summary: str, *, rule: Rule | None = None, **options: Any) -> tuple[Metric, ...]:
    """Declare what ``metrics.per_rank`` reports for a per-rank value.

    Args:
        name: without the varying part: ``memory/allocated`` declares ``memory/allocated/max`` and so on.
        summary: meaning of the value.
        rule: for the largest.
        options: unit, group, level: see :class:`Metric`.
    """
    what = {
        "max": f"{summary}; the largest of all ranks",
        "mean": "the same, mean over ranks",
        "median": "the same, lower median of ranks",
        "rank": "the rank that has the largest",
    }
    return tuple(
        Metric(
            name=f"{name}/{over}",
            summary=what[over],
            rule=rule if over == "max" else None,
            reduce="mean" if over == "mean" else "max",
            **{**options, **({"unit": "1"} if over == "rank" else {})},
        )
        for over in OVER
    )


def describe(metric: Metric) -> dict[str, Any]:
    """Return a declaration as JSON, without defaults: :func:`described` reads it."""
    return attrs.asdict(metric, filter=lambda attribute, value: value != attribute.default)


def described(said: Mapping[str, Any]) -> Metric:
    """Return the declaration written by :func:`describe`.

    Raises:
        TypeError: a field is missing, or unknown.
        PluginError: a field has an invalid value.
    """
    parts = {"rule": Rule, "bins": Bins}
    return Metric(**{key: parts[key](**value) if key in parts else value for key, value in said.items()})


class Names:
    """Declarations, looked up by the names of published values."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Take declarations; if several match a name, one without placeholders is used, otherwise the
        first."""
        self.metrics = tuple(metrics)
        self._exact = {metric.name: metric for metric in reversed(self.metrics)}
        patterns = [metric for metric in self.metrics if "{" in metric.name]
        self._patterns = [(_regex(metric.name), metric) for metric in patterns]
        self._known: dict[str, Metric | None] = {}

    def find(self, name: str) -> Metric | None:
        """Return the declaration of ``name``, None if it has none."""
        if name not in self._known:
            matching = (metric for regex, metric in self._patterns if regex.fullmatch(name))
            self._known[name] = self._exact.get(name) or next(matching, None)
        return self._known[name]

    def near(self, name: str) -> str:
        """Return `` (did you mean '...'?)`` with the nearest declared name, or an empty string."""
        return did_you_mean(name, [metric.name for metric in self.metrics])


def check_distinct(metrics: Iterable[Metric]) -> None:
    """Reject overlapping declarations.

    Raises:
        PluginError: a name occurs twice, or ``{statistic}`` in one stands for what another one declares.
    """
    seen: dict[str, str] = {}
    for metric in metrics:
        for name in _expanded(metric.name):
            key = re.sub(r"\{\w+\}", "{}", name)
            if key in seen:
                raise PluginError(
                    f"the metrics '{seen[key]}' and '{metric.name}' both declare '{name}': leave one out, or "
                    f"declare each statistic by itself ({', '.join(STATISTICS)})"
                )
            seen[key] = metric.name


def _expanded(name: str) -> list[str]:
    if "{statistic}" not in name:
        return [name]
    return [name.replace("{statistic}", each) for each in STATISTICS]


def may_name(pattern: str, declared: str) -> bool:
    """Return whether a shell-style pattern can match a name of a declaration.

    >>> [may_name(pattern, "gradients/{what}/{parameter}") for pattern in ("gradients/norm/l*.q", "norm/*")]
    [True, False]
    """
    asked = re.findall(r"\[[^]]+\]|.", pattern)
    pieces = re.findall(r"\{\w+\}|.", declared)

    @cache
    def meet(i: int, j: int) -> bool:
        """Return whether the remainders match; ``j`` may be within a placeholder."""
        if i == len(asked):
            return j == len(pieces)
        if asked[i] == "*":
            return meet(i + 1, j) or (j < len(pieces) and meet(i, j + 1))
        if j == len(pieces):
            return False
        if len(pieces[j]) > 1:
            return asked[i] != "/" and (meet(i + 1, j) or meet(i + 1, j + 1))
        return (asked[i] == "?" or fnmatchcase(pieces[j], asked[i])) and meet(i + 1, j + 1)

    return meet(0, 0)


def check_name(name: str) -> None:
    """Reject an invalid metric name.

    Raises:
        PluginError: it contains characters that a name must not have.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(
            f"{name!r} is no metric's name; expected words of letters, digits, '_', '-' and '.' between "
            "slashes"
        )


def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{\w+\}", pattern)
    return re.compile("[^/]+".join(re.escape(piece) for piece in pieces))
