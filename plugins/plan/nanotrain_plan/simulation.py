"""``nanotrain plan --simulate``: a run with slow ranks and failures, from planned or measured times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import Durations, NanotrainError, did_you_mean
from nanotrain_plan.goodput import MOST_FAILURES, Failures, Goodput, best_interval, daly, of_interval, young
from nanotrain_plan.many import StepTimes, Stragglers, step_times
from nanotrain_plan.plan import Plan

#: Hours of a device between failures of a run: 419 in 54 days of 16,384 (Llama 3, arXiv 2407.21783, 3.3.4).
DEVICE_HOURS = 54 * 24 * 16384 / 419

#: Runs that are simulated for each interval.
RUNS = 20


@attrs.define(frozen=True, kw_only=True)
class Wanted:
    """What to simulate."""

    stragglers: Stragglers
    failure_hours: float | None
    """Between failures of the whole run; None: :data:`DEVICE_HOURS` over its ranks."""
    checkpoint_minutes: float | None
    """Between checkpoints; None: as the recipe has it, or the best interval."""
    restart_minutes: float
    steps: int
    seed: int
    times: Path | None
    """Measured times: see :func:`read_times`."""


@attrs.define(frozen=True, kw_only=True)
class Simulated:
    """What came of it; seconds."""

    wanted: Wanted
    steps: StepTimes
    failures: Failures
    own: Goodput | None
    """Of the interval asked for, or the recipe's."""
    best: Goodput
    """Of the interval with the highest simulated goodput."""
    young: Goodput
    daly: Goodput


def simulate_plan(plan: Plan, wanted: Wanted) -> Simulated:
    """Simulate steps with slow ranks, and runs with failures.

    Raises:
        NanotrainError: the file of measured times is wrong, or the run would not end, as it almost always
            fails before its next checkpoint.
    """
    times, after = plan.time.durations, plan.time.after
    if wanted.times is not None:
        times, after = read_times(wanted.times, len(plan.stages.parts))
    layout = plan.layout
    waiting = max(layout.degree("tp", "cp"), layout.degree("ep", "etp"))
    steps = step_times(
        plan.stages.actions,
        times,
        after,
        pipelines=max(1, plan.ranks // (plan.stages.pp * waiting)),
        waiting=waiting,
        stragglers=wanted.stragglers,
        steps=wanted.steps,
        seed=wanted.seed,
    )
    hours = wanted.failure_hours or DEVICE_HOURS / plan.ranks
    failures = Failures(
        mean=hours * 3600, checkpoint=plan.checkpoints.later_seconds, restart=wanted.restart_minutes * 60
    )
    interval = _interval(plan, wanted, steps.mean)
    most = MOST_FAILURES * failures.mean
    if interval and interval + failures.checkpoint > most:
        raise NanotrainError(
            f"checkpoint: {interval / 60:.3g} minutes of training between checkpoints, and the run fails "
            f"every {failures.mean / 60:.3g}, so that it would hardly ever go on; expected at most "
            f"{most / 60:.3g}, such as --checkpoint-minutes {daly(failures) / 60:.3g}"
        )

    def told(seconds: float) -> Goodput:
        return of_interval(seconds, failures, runs=RUNS, seed=wanted.seed)

    return Simulated(
        wanted=wanted,
        steps=steps,
        failures=failures,
        own=told(interval) if interval else None,
        best=best_interval(failures, runs=RUNS, seed=wanted.seed),
        young=told(young(failures)),
        daly=told(daly(failures)),
    )


def _interval(plan: Plan, wanted: Wanted, step: float) -> float | None:
    """Return the seconds of work between checkpoints that are asked for, or the mean of the recipe's.

    ``step``: seconds of a step of the planned phase.
    """
    if wanted.checkpoint_minutes:
        return wanted.checkpoint_minutes * 60
    config = plan.recipe.checkpoint.config
    minutes, every = getattr(config, "every_minutes", None), getattr(config, "every", None)
    found = [minutes * 60] if minutes else []
    if every:  # steps of other phases take as much longer or shorter as they are planned to
        found.append(every * step * plan.seconds / (plan.recipe.run.steps * plan.time.seconds))
    return min(found) if found else None


def read_times(path: Path, stages: int | None = None) -> tuple[Durations, float]:
    """Return measured times of actions and what follows them, in seconds, of a JSON file.

    ``forward``, ``backward`` and ``weight`` are a number, or one for each stage; ``p2p``, ``after`` a number.
    If the number of stages is not known, lists may have any length.

    Raises:
        NanotrainError: naming file, key and what is expected.
    """
    try:
        table: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NanotrainError(f"--times: {path}: {error.strerror}") from None
    except ValueError as error:
        raise NanotrainError(f"--times: {path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise NanotrainError(
            f'--times: {path}: expected an object such as {{"forward": 0.1, "backward": 0.2}}'
        )
    known = ("forward", "backward", "weight", "p2p", "after")
    for key in table:
        if key not in known:
            near = did_you_mean(key, list(known))
            raise NanotrainError(f"--times: {path}: {key}: no such key{near}; keys: {', '.join(known)}")
    found: dict[str, Any] = {}
    for key in ("forward", "backward", "weight"):
        value = table.get(key, 0.0 if key == "weight" else None)
        each = value if isinstance(value, list) else [value] * (stages or 1)
        if len(each) != (stages or len(each)) or not all(_is_time(one) for one in each):
            wanted = f"a number of seconds, or {stages or 'several'}, one for each stage"
            given = "nothing" if value is None else repr(value)
            raise NanotrainError(f"--times: {path}: {key}: expected {wanted}, got {given}")
        found[key] = tuple(map(float, each))
    for key in ("p2p", "after"):
        if not _is_time(table.get(key, 0.0)):
            raise NanotrainError(f"--times: {path}: {key}: expected a number of seconds, got {table[key]!r}")
    return Durations(**found, p2p=float(table.get("p2p", 0.0))), float(table.get("after", 0.0))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def as_table(found: Simulated) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "steps": {**attrs.asdict(found.steps), "drawn": found.wanted.steps},
        "stragglers": attrs.asdict(found.wanted.stragglers),
        "failures": attrs.asdict(found.failures),
        "goodput": {
            name: None if each is None else attrs.asdict(each)
            for name, each in (
                ("own", found.own),
                ("best", found.best),
                ("young", found.young),
                ("daly", found.daly),
            )
        },
        "seed": found.wanted.seed,
    }
