"""The console's panel on a terminal: a few lines, each at most as wide as the terminal."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from rich.text import Text

from nanotrain_core.contracts import EvaluationReport, StepReport
from nanotrain_core.monitors.sparkline import Points, sparkline

#: Maximum columns of the names on the left, and of a sparkline.
LABEL, SPARK = 12, 40
#: Maximum lines of the monitors' health reports.
HEALTH_LINES = 3
#: Number of reports from which the remaining time is estimated.
RECENT = 50
SPINNER, ASCII_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
#: The engine's phases as shown here; others are too short to be shown.
PHASES = {"evaluation": "evaluating", "checkpoint": "saving a checkpoint"}
#: Seconds after which a phase is shown.
WORTH_A_WORD = 0.5


@attrs.define(eq=False)
class Panel:
    """Holds what is to be shown, and formats it as lines. Independent of the terminal."""

    name: str
    steps: int
    first_step: int = 0
    phase: Callable[[], str] = lambda: ""
    """The engine's current phase."""
    memory: Callable[[], str] = lambda: ""
    """The memory that this rank uses, human-readable."""
    clock: Callable[[], float] = time.monotonic
    report: StepReport | None = None
    fields: dict[str, Any] = attrs.field(factory=dict)
    """Fields of the last step's line."""
    evaluation: EvaluationReport | None = None
    best: EvaluationReport | None = None
    saved: tuple[int, float] | None = None
    """The last checkpoint's step, and when it was complete."""
    asked: dict[str, str] = attrs.field(factory=dict)
    """Published metrics that the recipe requests."""
    health: str = ""
    over: str = ""
    """How the run ended."""
    losses: Points = attrs.field(factory=Points)
    validation: Points = attrs.field(factory=Points)
    _times: deque[tuple[int, float]] = attrs.field(factory=lambda: deque(maxlen=RECENT))
    _doing_since: tuple[str, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._doing_since = ("", self.clock())

    def step(self, report: StepReport, fields: dict[str, Any]) -> None:
        """Add a step."""
        self.report, self.fields = report, fields
        self.losses.add(report.loss)
        self._times.append((report.step, self.clock()))

    def evaluated(self, report: EvaluationReport) -> None:
        """Add a validation loss."""
        self.evaluation = report
        self.validation.add(report.loss)
        if self.best is None or report.loss <= self.best.loss:
            self.best = report

    def saved_now(self, step: int) -> None:
        """Record that a checkpoint is complete."""
        self.saved = (step, self.clock())

    def rolled_back(self) -> None:
        """Restart the estimate of the remaining time."""
        self._times.clear()

    def seconds_left(self) -> float | None:
        """Return the remaining time, including evaluations and checkpoints; None while it is unknown."""
        times = tuple(self._times)  # called from another thread than the steps
        if len(times) < 2:
            return None
        (first, began), (last, ended) = times[0], times[-1]
        return (ended - began) / (last - first) * (self.steps - last) if last > first else None

    # --- lines ------------------------------------------------------------------------------

    def lines(self, width: int, height: int = 25, *, ascii_only: bool = False) -> list[Text]:
        """Return the lines that fit: the line with the bar first, then the most important.

        No line is wider than ``width``, and there are less than ``height`` of them.
        """
        width, height = max(1, width - 1), max(1, height - 1)  # some terminals wrap at a full last column
        rows = [self._head(width, ascii_only), *(self._rows(width, ascii_only) if self.report else ())]
        for row in rows:
            row.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
        return rows[:height]

    def _head(self, width: int, ascii_only: bool) -> Text:
        now = self.report.step if self.report else self.first_step
        counted = f"{now}/{self.steps}"
        if self.over:
            counted += f"  {self.over}"
        elif doing := self._doing(ascii_only):
            counted += f"  {doing}"
        elif (left := self.seconds_left()) is not None:
            counted += f"  {clock_time(left)} left"
        name = _label(self.name)
        room = min(SPARK, width - name.cell_len - len(counted) - 2)
        head = name
        if room >= 8:
            head = Text.assemble(name, bar(now / max(1, self.steps), room, ascii_only=ascii_only), "  ")
        return head.append(counted, style="bold" if not self.over else "")

    def _doing(self, ascii_only: bool) -> str:
        """Return a slow phase in progress, with a spinner and its seconds."""
        phase, now = self.phase(), self.clock()
        if self.report is None:  # before the first step ends, the user waits for it
            phase = PHASES.get(phase) or ("first step" if phase not in ("", "start") else "starting")
        else:
            phase = PHASES.get(phase, "")
        if phase != self._doing_since[0]:
            self._doing_since = (phase, now)
        seconds = now - self._doing_since[1]
        if not phase or (self.report is not None and seconds < WORTH_A_WORD):
            return ""
        frames = ASCII_SPINNER if ascii_only else SPINNER
        return f"{frames[int(now * 8) % len(frames)]} {phase} {clock_time(seconds)}"

    def _rows(self, width: int, ascii_only: bool) -> list[Text]:
        """Return the rows about the last step, the most important first."""
        assert self.report is not None
        longest = max(len(self.losses.recent()), len(self.validation.recent()))
        fields, spark = dict(self.fields), min(SPARK, longest, width - LABEL - 12)
        fields.pop("step", None)
        terms = [f"{key} {fields.pop(key)}" for key in [*fields] if key in self.report.losses]
        rows = [self._curve("loss", fields.pop("loss", ""), self.losses, spark, terms, ascii_only)]
        if self.evaluation is not None:
            value, said = f"{self.evaluation.loss:.4f}", self._of_evaluation(self.evaluation)
            rows.append(self._curve("validation", value, self.validation, spark, said, ascii_only))
        rows.append(_row("speed", [*_speed(fields), *filter(None, [self.memory()])]))
        rows.append(_row("update", [f"{key.replace('_', ' ')} {value}" for key, value in fields.items()]))
        if self.asked:
            rows.append(_row("metrics", [f"{name} {value}" for name, value in self.asked.items()]))
        if self.saved is not None and not self.over:
            step, then = self.saved
            rows.append(_row("saved", [f"step {step}", f"{clock_time(self.clock() - then)} ago"]))
        said = textwrap.wrap(self.health, max(20, width - LABEL), max_lines=HEALTH_LINES, placeholder=" ...")
        return rows + [_row("" if number else "health", [line]) for number, line in enumerate(said)]

    def _of_evaluation(self, report: EvaluationReport) -> list[str]:
        bits = report.bits_per_byte
        said = [f"at step {report.step}", *([] if bits is None else [f"{bits:.4f} bits/byte"])]
        if self.best is not None and self.best is not report:
            said.append(f"best {self.best.loss:.4f} at step {self.best.step}")
        return said

    def _curve(
        self, label: str, value: str, points: Points, spark: int, said: Sequence[str], ascii_only: bool
    ) -> Text:
        shown = sparkline(points.recent(), spark, ascii_only=ascii_only) if spark > 1 else ""
        row = _label(label).append(f"{value:<10}", style="bold")
        if shown:
            row.append(f"{shown:<{spark}}  ", style="cyan")
        return row.append("   ".join(said), style="dim")


def bar(done: float, width: int, *, ascii_only: bool = False) -> Text:
    """Return a progress bar, with a resolution of half a character."""
    halves = round(2 * width * min(1.0, max(0.0, done)))
    full, half = divmod(halves, 2)
    solid, end = ("#", "") if ascii_only else ("━", "╸")
    text = Text(solid * full + (end * half), style="cyan")
    return text.append(("." if ascii_only else "━") * (width - text.cell_len), style="bright_black")


def clock_time(seconds: float) -> str:
    """Return ``4s``, ``3:05``, ``2:03:05`` or ``5d 2h``.

    >>> [clock_time(x) for x in (4.4, 185, 7385, 442000)]
    ['4s', '3:05', '2:03:05', '5d 2h']
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 86400}d {whole // 3600 % 24}h"


def _speed(fields: dict[str, Any]) -> list[str]:
    """Remove the speed from a step's fields, and return it as text."""
    tokens = fields.pop("tokens/s", "?").replace("_", ",")
    said = [f"{tokens} tokens/s", f"{fields.pop('ms/step', '?')} ms/step"]
    known = (("mfu", "MFU"), ("bubble", "bubble"))
    return said + [f"{word} {fields.pop(key)}" for key, word in known if key in fields]


def _label(name: str) -> Text:
    return Text(f"{name:<{LABEL}}" if len(name) < LABEL else f"{name}  ", style="dim", no_wrap=True)


def _row(label: str, parts: Sequence[str]) -> Text:
    return _label(label).append("   ".join(parts), style="none")
