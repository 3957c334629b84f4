"""Reads ``metrics.jsonl`` of a run folder: a curve for each metric, without steps that the run abandoned.

A run that is resumed, restarted or rolled back continues in the same file, possibly from an earlier step.
Each such part is an *attempt*, numbered from 1, and every row has its attempt's number. What an attempt wrote
after the step from which the next one began is not in the curves but in ``History.abandoned``. An attempt of
which the first row is unreadable begins with its first step that can be read, as a resume. Torch-free.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import attrs

from nanotrain_core.errors import PluginError
from nanotrain_core.metrics.declared import Metric, described
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.metrics.rows import check_row, histogram_of, metrics_of, row_of

FILE = "metrics.jsonl"

#: Events whose rows are in :attr:`History.events`.
_EVENTS = ("start", "checkpoint", "save_failed", "rollback", "end")
#: Bytes read at once from the end of a file, to find its last row.
_TAIL = 2**20


@attrs.define(eq=False)
class Curve:
    """The values of one metric, by step: 16 bytes each."""

    steps: array[int] = attrs.field(factory=lambda: array("q"))
    """Ascending, each step once."""
    values: array[float] = attrs.field(factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a value; one with the last step replaces it."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> Curve:
        """Remove the values after ``step``, and return them."""
        at = bisect_right(self.steps, step)
        rest = Curve(self.steps[at:], self.values[at:])
        del self.steps[at:], self.values[at:]
        return rest

    @property
    def last(self) -> float:
        """The newest value.

        Raises:
            IndexError: there is none.
        """
        return self.values[-1]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)


@attrs.define(frozen=True)
class Continuation:
    """Where a run continued from an earlier step, or from the same one after an interruption."""

    attempt: int
    """The attempt that begins here: 2 or more."""
    kind: Literal["resume", "rollback"]
    """A resume starts new processes; a rollback is within them."""
    step: int
    """The last step that is kept of earlier attempts: this one's first step is the next."""
    came_to: int
    """The last step of the previous attempt: ``came_to - step`` steps were lost."""
    time: float
    """Seconds since 1970."""
    reason: str
    """For a rollback, its monitor's reason; for a resume, how the previous attempt ended: ``preempted``, or
    ``killed`` if it is not recorded."""


@attrs.define(eq=False)
class History:
    """What a run has logged so far. Curves have the last attempt's value for every step."""

    curves: dict[str, Curve] = attrs.field(factory=dict)
    """By metric name: ``loss``, ``validation/loss``, ``checkpoint/seconds`` and published ones. Each has a
    value, and so has each list of histograms and texts."""
    times: Curve = attrs.field(factory=Curve)
    """Seconds since 1970 when each logged step was written."""
    histograms: dict[str, list[tuple[int, Histogram]]] = attrs.field(factory=dict)
    """By name: step and histogram, ascending."""
    texts: dict[str, list[tuple[int, str]]] = attrs.field(factory=dict)
    """By name: step and text, ascending."""
    continuations: list[Continuation] = attrs.field(factory=list)
    """Where it was resumed or rolled back, oldest first."""
    abandoned: dict[int, dict[str, Curve]] = attrs.field(factory=dict)
    """By attempt, the curves of steps it took after the step from which a later one began."""
    events: list[dict[str, Any]] = attrs.field(factory=list)
    """The rows ``start``, ``checkpoint``, ``save_failed``, ``rollback`` and ``end``, of all attempts,
    unchanged."""
    declared: dict[str, Metric] = attrs.field(factory=dict)
    """Declarations by name or pattern, from the newest attempt: unit, group, rule."""
    torn: int = 0
    """Number of unreadable lines, such as the last one of a run killed while writing."""
    attempt: int = 0
    """The newest attempt; 0 for an empty file."""
    step: int = 0
    """The newest step of the newest attempt."""

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest ``start`` row: name, steps, world_size, device and so on; empty without one."""
        return next((row for row in reversed(self.events) if row["event"] == "start"), {})

    @property
    def end(self) -> Mapping[str, Any]:
        """The ``end`` row of the newest attempt; empty while it runs, and if it was killed."""
        last = self.events[-1] if self.events else {}
        return last if last.get("event") == "end" else {}


def read_metrics(
    folder: Path | str,
    names: Sequence[str] = ("*",),
    *,
    histograms: bool = True,
    abandoned: bool = True,
) -> History:
    """Read a run folder's ``metrics.jsonl``, line by line, even while the run is in progress.

    ::

        history = read_metrics("runs/laptop", ["loss", "validation/*"])
        for step, loss in history.curves["loss"]: ...
        for continuation in history.continuations: ...      # where it was resumed or rolled back
        history.histograms["gradients/histogram/embed.weight"][-1]

    Args:
        folder: of the run.
        names: the metrics to keep, each a name or a shell-style pattern. A curve takes 16 bytes per value;
            other metrics take none.
        histograms: whether to keep histograms.
        abandoned: whether to keep the curves of steps that the run abandoned.

    Returns:
        An empty history if there is no file. Non-finite values are floats again; unreadable lines
        are skipped and counted in ``torn``.
    """
    reader = _Reader(_wanted(names), histograms=histograms, abandoned=abandoned)
    path = Path(folder) / FILE
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                reader.line(line)
    return reader.history


def last_attempt(path: Path) -> int:
    """Return the attempt of the last row of a file, 0 if there is none. Reads only the end of the file.

    In a file whose rows have no attempt, it is counted.
    """
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        size, length = file.seek(0, 2), 0
        while length < size:
            length = min(size, 2 * length or _TAIL)
            file.seek(size - length)
            lines = file.read(length).splitlines()
            for line in reversed(lines[1:] if length < size else lines):
                row = row_of(line)
                if row is not None:
                    said = row.get("attempt")
                    return said if isinstance(said, int) else read_metrics(path.parent, ()).attempt
    return 0


def _wanted(names: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a name matches, cached by name: a file has the same ones in every row."""
    patterns, known = tuple(names), dict[str, bool]()

    def wanted(name: str) -> bool:
        if name not in known:
            known[name] = any(fnmatchcase(name, pattern) for pattern in patterns)
        return known[name]

    return wanted


def _cut(rows: dict[str, Any], step: int) -> None:
    """Remove the pairs of a step and its value that are after ``step``, and lists of which none is left."""
    for name, pairs in [*rows.items()]:
        del pairs[bisect_right(pairs, step, key=lambda each: int(each[0])) :]
        if not pairs:
            del rows[name]


class _Reader:
    """Adds rows to a history, in file order."""

    def __init__(self, wanted: Callable[[str], bool], *, histograms: bool, abandoned: bool) -> None:
        self.history = History()
        self.wanted, self.histograms, self.abandoned = wanted, histograms, abandoned
        self.edges: dict[tuple[float, ...], tuple[float, ...]] = {}

    def line(self, line: bytes) -> None:
        if not line.strip():
            return
        row = row_of(line)
        try:
            if row is None:
                self.history.torn += 1
            else:
                self.row(row)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PluginError):
            self.history.torn += 1  # a row with other content

    def row(self, row: dict[str, Any]) -> None:
        """Add a row.

        Raises:
            Exception: it has other content. Nothing of it is in the history then.
        """
        check_row(row)
        event, history, step = row["event"], self.history, row.get("step") or 0
        declared = [*map(described, row["metrics"])] if event == "declared" else []
        values = {name: float(value) for name, value in metrics_of(row).items() if self.wanted(name)}
        texts, histograms = self.texts(row), self.histograms_of(row)
        last = [history.curves[name].steps[-1] for name in values if name in history.curves]
        last += [
            rows[name][-1][0]
            for rows, new in ((history.texts, texts), (history.histograms, histograms))
            for name in new
            if name in rows
        ]
        begun = event in ("start", "rollback", "end") or (row.get("attempt") or 0) <= history.attempt
        if begun and step < max(last, default=0):
            raise ValueError(f"step {step} comes after {max(last)}")
        if not begun and step:  # the row that began its attempt is unreadable
            # A run may evaluate or save at the step that it goes on from.
            self.begin(row, "resume", min(history.step, step - (event == "step")), self.ended())
        if event == "start":
            self.begin(row, "resume", row["first_step"], self.ended())
        elif event == "rollback":
            self.begin(row, "rollback", row["restored"], row["reason"])
        elif "step" in row:
            history.step = max(history.step, step)
        history.declared |= {metric.name: metric for metric in declared}
        if event in _EVENTS:
            history.events.append(row)
        if event == "step":
            history.times.add(step, float(row["time"]))
        for name, value in values.items():
            history.curves.setdefault(name, Curve()).add(step, value)
        for name, text in texts.items():
            history.texts.setdefault(name, []).append((step, text))
        for name, histogram in histograms.items():
            history.histograms.setdefault(name, []).append((step, histogram))

    def begin(
        self, row: Mapping[str, Any], kind: Literal["resume", "rollback"], step: int, reason: str
    ) -> None:
        """Continue from ``step`` with the next attempt."""
        history, before = self.history, self.history.attempt
        history.attempt = int(row.get("attempt", before + 1))
        if before or history.step:  # the row that began the first attempt may be unreadable
            came_to = max(history.step, int(row["step"]) if kind == "rollback" else 0)
            history.continuations.append(
                Continuation(history.attempt, kind, step, came_to, float(row["time"]), reason)
            )
            self.cut(step, before)
        history.step = step

    def cut(self, step: int, attempt: int) -> None:
        """Abandon everything after ``step``, and the metrics that have nothing else."""
        history = self.history
        history.times.cut(step)
        cut = {name: curve.cut(step) for name, curve in history.curves.items()}
        if self.abandoned and any(cut.values()):
            history.abandoned[attempt] = {name: curve for name, curve in cut.items() if curve}
        history.curves = {name: curve for name, curve in history.curves.items() if curve}
        for rows in (history.histograms, history.texts):
            _cut(rows, step)

    def ended(self) -> str:
        end = self.history.end
        return str(end["reason"]) if end else "killed"

    def texts(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts of a row that are wanted."""
        found = row.get("texts", {}) if row["event"] == "metrics" else {}
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError("one of its texts is none")
        return {name: text for name, text in found.items() if self.wanted(name)}

    def histograms_of(self, row: Mapping[str, Any]) -> dict[str, Histogram]:
        """Return the histograms of a row that are wanted; edges, the same in every row, are stored once."""
        found = row.get("histograms", {}) if self.histograms and row["event"] == "metrics" else {}
        told = {name: histogram_of(said) for name, said in found.items() if self.wanted(name)}
        return {
            name: attrs.evolve(each, edges=self.edges.setdefault(each.edges, each.edges))
            for name, each in told.items()
        }
