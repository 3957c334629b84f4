"""What a metric is: its name, unit, meaning, reduction over ranks, cost, and which values are good.
Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import attrs
from attrs.validators import in_, instance_of, optional

from nanotrain_core.errors import PluginError, did_you_mean

Kind = Literal["scalar", "histogram", "text"]
Reduce = Literal["sum", "mean", "max", "min", "last"]
Level = Literal["minimal", "standard", "debug"]
Cost = Literal["host", "device", "layers", "weights"]
Verdict = Literal["good", "warn", "bad"]

#: What each cost means.
COSTS: Mapping[Cost, str] = {
    "host": "the host has the number anyway",
    "device": "a number that the device has anyway; it travels in the one reduction of a logged step",
    "layers": "a few kernels at each watched module, in logged steps",
    "weights": "a pass over all weights, gradients or optimizer state, in logged steps",
}

_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)*")
_PATTERN = re.compile(r"(?:[\w.\-]|\{\w+\})+(?:/(?:[\w.\-]|\{\w+\})+)*")


@attrs.define(frozen=True, kw_only=True)
class Rule:
    """Which values of a metric are worth a word. A number that is none is always bad."""

    warn_below: float | None = None
    bad_below: float | None = None
    warn_above: float | None = None
    bad_above: float | None = None
    low: str = ""
    """What a value that is too low says, and what to do about it: one plain sentence."""
    high: str = ""
    """The same of one that is too high."""

    def judge(self, value: float) -> Verdict:
        """Return what ``value`` is.

        >>> [Rule(warn_above=3, bad_above=10).judge(x) for x in (2, 4, 11, float("nan"))]
        ['good', 'warn', 'bad', 'bad']
        """
        if math.isnan(value) or _outside(value, self.bad_below, self.bad_above):
            return "bad"
        return "warn" if _outside(value, self.warn_below, self.warn_above) else "good"

    def __str__(self) -> str:
        """Return the limits in words, ``warn above 3, bad above 10``."""
        limits = (
            (f"{name.replace('_', ' ')} {limit:g}", limit)
            for name in ("warn_below", "bad_below", "warn_above", "bad_above")
            if (limit := getattr(self, name)) is not None
        )
        return ", ".join(text for text, _ in limits)


def _outside(value: float, below: float | None, above: float | None) -> bool:
    return (below is not None and value < below) or (above is not None and value > above)


@attrs.define(frozen=True, kw_only=True)
class Bins:
    """The edges of a histogram, the same on every rank, so that counts add up."""

    low: float
    high: float
    count: int = 64
    """Bins between them; what lies outside, and what is not finite, is counted too."""
    log: bool = False
    """Of equal width in the logarithm of the magnitude: signs are dropped, and ``low`` is above 0."""

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
    """What is known of a metric before anything runs."""

    name: str = attrs.field(validator=_pattern)
    """Or a pattern of names: ``gradients/norm/{parameter}``, where ``{parameter}`` is anything without a
    slash."""
    unit: str = attrs.field(validator=instance_of(str))
    """``tokens/s``, ``nats``, ``1`` for a plain number."""
    group: str = attrs.field(validator=instance_of(str))
    """What it is shown with: ``loss``, ``gradients``, ``memory``."""
    summary: str = attrs.field(validator=instance_of(str))
    """What it means, in one line."""
    kind: Kind = attrs.field(default="scalar", validator=in_(get_args(Kind)))
    reduce: Reduce = attrs.field(default="mean", validator=in_(get_args(Reduce)))
    """Over ranks, and over what a rank publishes between two logged steps. ``last`` is the last that a rank
    published, of ranks that differ the largest."""
    level: Level = attrs.field(default="standard", validator=in_(get_args(Level)))
    cost: Cost = attrs.field(default="host", validator=in_(get_args(Cost)))
    rule: Rule | None = attrs.field(default=None, validator=optional(instance_of(Rule)))
    bins: Bins | None = attrs.field(default=None, validator=optional(instance_of(Bins)))
    """Of a histogram."""

    def __attrs_post_init__(self) -> None:
        if (self.kind == "histogram") is not (self.bins is not None):
            raise PluginError(f"metric {self.name}: a histogram has bins, and nothing else has")


class Names:
    """Declarations, to be asked by the names that numbers have in a run."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Take declarations; of several that match a name, one without placeholders counts, else the
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
        """Return `` (did you mean '...'?)`` with the declared name that comes next, or an empty string."""
        return did_you_mean(name, [metric.name for metric in self.metrics])


def check_name(name: str) -> None:
    """Refuse what no metric can be called.

    Raises:
        PluginError: it has other characters than a name may have.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(
            f"{name!r} is no metric's name; expected words of letters, digits, '_', '-' and '.' between "
            "slashes"
        )


def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{\w+\}", pattern)
    return re.compile("[^/]+".join(re.escape(piece) for piece in pieces))
