"""What runs of ``python -m benchmarks.quality`` say, in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import attrs

from benchmarks.gap import Gap
from benchmarks.report import table

AGAIN = "bf16-again"
#: What a training loss may be above bfloat16's: DeepSeek-V3, arXiv 2412.19437, reports less.
BAR = 0.0025


@attrs.define(frozen=True)
class Plan:
    """What is to be run."""

    precision: str
    seed: int
    steps: int
    layout: str = ""
    """As on the command line; empty: one process."""
    changes: tuple[str, ...] = ()
    """``KEY=VALUE`` of the recipe."""
    after: int = 0
    """Steps that bfloat16 made before, on one process, for all precisions of the seed."""


@attrs.define(frozen=True, kw_only=True)
class Trained:
    """What came of it. Losses are in nats."""

    plan: Plan
    model: str
    text: str
    """Its size, and what of it is held out."""
    tokens: int
    """Trained on."""
    training: tuple[float, ...]
    """The run's training loss: means of each twentieth of its steps."""
    next_token: tuple[float, ...]
    """The part of it that is of the next token, without multi-token prediction and balance."""
    held_out: float
    """Of the next token, after the last step."""
    held_out_tokens: int
    seconds: float


#: By layout, precision and seed.
Runs = dict[tuple[str, str, int], Trained]


def read(file: Path) -> list[Trained]:
    """Return the runs of a file of lines of JSON."""
    return [_run(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _run(line: dict[str, object]) -> Trained:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    plan = dict(line["plan"])  # type: ignore[call-overload]
    return Trained(**{**given, "plan": Plan(**{**plan, "changes": tuple(plan["changes"])})})  # type: ignore[arg-type]


def tables(runs: Sequence[Trained]) -> str:
    """Return a table for each number of steps, of those before, and changes of the recipe."""
    groups: dict[tuple[int, int, tuple[str, ...]], Runs] = {}
    for run in runs:
        plan = run.plan
        groups.setdefault((plan.steps, plan.after, plan.changes), {})[
            plan.layout, plan.precision, plan.seed
        ] = run
    return "\n\n".join(f"{_title(group)}\n\n{_table(group)}" for group in groups.values())


def _title(runs: Runs) -> str:
    """Return what was run, beginning with the command."""
    first = next(iter(runs.values()))
    seeds = " ".join(map(str, sorted({seed for _, _, seed in runs})))
    words = [f"--runs FILE --steps {first.plan.steps} --seeds {seeds}"]
    words += [f"--after {first.plan.after}"] * bool(first.plan.after)
    words += [f"--set {change}" for change in first.plan.changes]
    words += ["--layout LAYOUT"] * any(layout for layout, _, _ in runs)
    return (
        f"`python -m benchmarks.quality {' '.join(words)}`: {first.model}; {first.tokens:,} tokens, "
        f"each read once, {_counted(first.plan)}; {first.held_out_tokens:,} held out ({first.text})."
    )


def _counted(plan: Plan) -> str:
    if not plan.after:
        return "the last fifth of which count"
    common = f"the first {plan.after} of {plan.steps} steps made once in bf16 for all precisions"
    return f"{common}, the last fifth of the others counting"


def _table(runs: Runs) -> str:
    rows = [_row(runs, *of) for of in dict.fromkeys((layout, precision) for layout, precision, _ in runs)]
    alone = not any(layout for layout, _, _ in runs)
    return table(HEADER[1:-1], [row[1:-1] for row in rows]) if alone else table(HEADER, rows)


HEADER = (
    "layout",
    "precision",
    "training loss",
    "gap, %",
    "of each seed",
    "of each fifth",
    f"95% interval, and a bar of {100 * BAR:g}%",
    "gap of the next token alone",
    "held-out gap",
    "farthest from one process",
)


def _row(runs: Runs, layout: str, precision: str) -> list[str]:
    mine = [run for of, run in runs.items() if of[:2] == (layout, precision)]
    training, *others = (gap(runs, layout, precision, measure) for measure in MEASURES)
    return [
        layout or "one process",
        precision,
        f"{mean(map(last_fifth, mine)):.4f}",
        _told(training),
        ", ".join(f"{100 * each:+.2f}" for each in training.each),
        ", ".join(f"{100 * each:+.2f}" for each in _by_fifths(runs, layout, precision)),
        _judged(training) if precision != AGAIN else "",
        *map(_told, others),
        f"{100 * _farthest(runs, mine):.2f}" if layout else "",
    ]


def _by_fifths(runs: Runs, layout: str, precision: str) -> list[float]:
    """Return the mean gap of each fifth of the steps: whether it grows."""
    of = (gap(runs, layout, precision, lambda run, n=n: _fifth(run.training, n)) for n in range(5))
    return [found.mean for found in of if found.each]


def _told(found: Gap) -> str:
    """Return the mean and its standard error, in percent."""
    if len(found.each) < 2:
        return "".join(f"{100 * each:+.2f}" for each in found.each)
    return f"{100 * found.mean:+.2f} ± {100 * found.error:.2f}"


def _judged(found: Gap) -> str:
    """Return whether the bar is met, as far as so many seeds can."""
    if len(found.each) < 2:
        return ""
    low, high = found.interval
    word = "met" if high < BAR else "not met" if low > BAR else "not decided"
    more = f" ({found.seeds_for(BAR)} seeds for ± {100 * BAR:g}%)" if word == "not decided" else ""
    return f"{100 * low:+.2f} to {100 * high:+.2f}: {word}{more}"


def _fifth(curve: Sequence[float], number: int) -> float:
    """Return the mean of a fifth of the steps, counted from 0."""
    first = len(curve) * number // 5
    return mean(curve[first : max(first + 1, len(curve) * (number + 1) // 5)])


def last_fifth(run: Trained) -> float:
    """Return the mean training loss of the last fifth of the steps."""
    return _fifth(run.training, 4)


MEASURES: tuple[Callable[[Trained], float], ...] = (
    last_fifth,
    lambda run: _fifth(run.next_token, 4),
    lambda run: run.held_out,
)


def gap(runs: Runs, layout: str, precision: str, measure: Callable[[Trained], float]) -> Gap:
    """Return how far a precision is from bfloat16 on a layout, in the seeds that have both.

    The control's is from ``bf16``, any other's from the mean of both.
    """
    base = ("bf16",) if precision in {"bf16", AGAIN} else ("bf16", AGAIN)
    pairs = []
    for run in (run for (where, name, _), run in runs.items() if (where, name) == (layout, precision)):
        others = [runs.get((layout, name, run.plan.seed)) for name in base]
        if found := [measure(other) for other in others if other and precision != "bf16"]:
            pairs.append((measure(run), mean(found)))
    return Gap.relative(*zip(*pairs, strict=True)) if pairs else Gap(())


def _farthest(runs: Runs, mine: Sequence[Trained]) -> float:
    """Return the largest relative difference between a point of a curve and that of one process."""
    pairs = [(run, runs.get(("", run.plan.precision, run.plan.seed))) for run in mine]
    return max(
        (
            abs(a / b - 1)
            for run, one in pairs
            if one
            for a, b in zip(run.training, one.training, strict=True)
        ),
        default=math.nan,
    )
