"""One row of the fault matrix: the fault injected into a run, and what must hold of every run.

A row gets a fresh :class:`~nanotrain_core.testing.chaos.bench.Trial` and a random generator, hurts the
run, and returns the launches. What holds for every row (same final weights as the undisturbed run, the
same sequences at every step, no false success, few steps lost) is judged by :func:`judge`; a row adds
or replaces what is particular to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import ClassVar

import attrs

from nanotrain_core.testing.chaos.bench import Bench, Ended, Trial

AGAIN = ("--max-restarts", "1")
RESUME = ("--resume", "auto")


@attrs.define
class Outcome:
    """One fault, survived or not."""

    problems: list[str]
    steps_lost: int = 0
    replay_mismatches: int = 0
    sample_errors: int = 0
    """Steps that saw other sequences than the undisturbed run: gaps and repeats."""
    false_successes: int = 0
    detect_s: float | None = None
    recover_s: float | None = None


class Row:
    """One fault of the matrix."""

    number: ClassVar[str]
    """As in the table of the documentation."""
    name: ClassVar[str]
    guard: ClassVar[bool] = False
    least_ranks: ClassVar[int] = 1
    lost: ClassVar[float] = 1
    """Intervals between checkpoints that may be lost."""
    steps: ClassVar[int] = 0
    """Steps that may be lost beside these; 0: as many as a save that was on its way has taken."""
    same_end: ClassVar[bool] = True
    """Whether the run must end with the weights of the undisturbed one."""
    short: ClassVar[bool] = False
    """Whether it is part of the short form."""

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        """Return why it cannot run on this machine: empty if it can."""
        return ""

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        """Run, inject the fault, restart if necessary; yield what is wrong."""
        raise NotImplementedError

    def run(self, bench: Bench, folder: str, random: Random) -> Outcome:
        """Run once."""
        trial = Trial(bench, folder, guard=self.guard)
        outcome = Outcome(list(self.hurt(trial, random)))
        judge(self, trial, outcome)
        return outcome


def judge(row: Row, trial: Trial, outcome: Outcome) -> None:
    """Fill in the figures of a run, and what every row must keep."""
    bench, baseline = trial.bench, trial.bench.baseline
    outcome.steps_lost = trial.steps_lost()
    outcome.detect_s, outcome.recover_s = trial.seconds()
    limit = row.lost * bench.settings.every + (row.steps or trial.on_its_way())
    if outcome.steps_lost > limit:
        outcome.problems.append(f"{outcome.steps_lost} steps were lost, at most {limit} may be")
    if row.same_end:
        expected, found = baseline.losses(), trial.losses()
        outcome.replay_mismatches = sum(losses != expected.get(step) for step, losses in found.items())
        expected_rows, rows = baseline.committed(), trial.committed()
        outcome.sample_errors = sum(
            rows.get(step) != expected_rows.get(step) for step in {*rows, *expected_rows}
        )
        if trial.weights() != baseline.weights():
            outcome.problems.append("the final weights are not those of the undisturbed run")
        if outcome.replay_mismatches:
            outcome.problems.append(f"{outcome.replay_mismatches} steps had another loss")
        if outcome.sample_errors:
            outcome.problems.append(f"{outcome.sample_errors} steps saw other sequences")
    if (trial.folder / "checkpoints").is_dir():
        false = trial.false_successes()
        outcome.false_successes = len(false)
        outcome.problems += false


def expect(ended: Ended, code: int, *texts: str) -> Iterator[str]:
    """Yield how a launch's end differs from the expected one."""
    if ended.code != code:
        yield f"exit code {ended.code}, expected {code}: {ended.err.strip()[-400:]}"
    for text in texts:
        if text not in ended.err:
            yield f"stderr does not say {text!r}: {ended.err.strip()[-400:]}"
    before, found, after = ended.err.partition("Traceback")
    if found:
        yield f"a traceback was shown: {before[-300:]}{found}{after[:1500]}"


def some_step(trial: Trial, random: Random, *, after: int = 1) -> int:
    """Return a random step before the last one, after ``after`` due checkpoints."""
    return random.randrange(after * trial.bench.settings.every + 1, trial.bench.settings.steps - 1)


def save_step(trial: Trial, random: Random, *, after: int = 1) -> int:
    """Return a random step, not the last, after which a checkpoint is saved, with ``after`` earlier ones."""
    every, steps = trial.bench.settings.every, trial.bench.settings.steps
    return every * random.randrange(after + 1, (steps - 1) // every + 1)


def unsettled_step(trial: Trial, random: Random) -> int:
    """Return a random step well after the first checkpoint, early enough to fail and to roll back."""
    return random.randrange(trial.bench.settings.every + 3, trial.bench.settings.steps - 6)


def some_rank(trial: Trial, random: Random) -> int:
    return random.randrange(trial.bench.settings.ranks)
