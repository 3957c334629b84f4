"""A soak: one run is hurt again and again, at random, and must end as the undisturbed one.

Rows of the fault matrix try one fault in a fresh run. A soak tries what they cannot: faults that follow one
another in one folder, as over a month, some of which the launcher answers by restarting the ranks and some of
which end it, so that a scheduler would start it again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import attrs

from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.testing.chaos.bench import Bench, Ended, Settings, Trial
from nanotrain_core.testing.chaos.row import RESUME, Outcome, Row, judge

#: Seconds after a launcher is killed until its ranks have ended by themselves.
ORPHANS_END = 2.0


@attrs.define(frozen=True)
class Fault:
    """One of a soak."""

    name: str
    order: Mapping[str, Any]
    """Fields of :class:`~nanotrain_core.testing.chaos.inject.Order`."""
    ends_launch: bool = False
    """Whether the launcher ends too, with one of :attr:`codes`, and must be started again."""
    codes: Sequence[int] = ()
    kills_launcher: bool = False


#: Drawn with equal probability. ``at``: the place in a step where it strikes.
FAULTS = (
    Fault("a rank is killed", {"act": "kill"}),
    Fault("a rank is killed while it reads data", {"act": "kill", "at": "data"}),
    Fault("a rank raises", {"act": "fail", "at": "data"}),
    Fault("a rank is stopped", {"act": "stop", "at": "data"}),
    Fault("a rank sleeps", {"act": "sleep", "at": "data", "amount": 1e5}),
    Fault("SIGTERM to a rank", {"act": "terminate"}, True, (Exit.PREEMPTED,)),
    Fault(
        "the launcher is killed", {"act": "sleep", "amount": 2.0, "rank": -1}, True, (-signal.SIGKILL,), True
    ),
    Fault("a bit of a replica flips", {"act": "flip"}, True, (Exit.CORRUPTED,)),
)


def draw(settings: Settings, count: int, random: Random) -> list[Fault]:
    """Return ``count`` faults in the order of their steps: one in each of as many equal parts of the run.

    The first comes after the first checkpoint, the last before the last step. No two are in consecutive
    steps: ranks that are sent SIGTERM may finish the next step before they stop, and the run is resumed
    after it.
    """
    first, last = settings.every + 1, settings.steps - 1
    faults: list[Fault] = []
    for number in range(count):
        begin, end = (first + (last - first) * n // count for n in (number, number + 1))
        if faults:
            begin = max(begin, faults[-1].order["step"] + 2)
        fault = random.choice([each for each in FAULTS if settings.ranks > 1 or each.order["act"] != "flip"])
        rank = fault.order.get("rank", random.randrange(settings.ranks))
        where = {"rank": rank, "step": random.randrange(begin, end)}
        if fault.order["act"] == "flip":
            where["amount"] = random.random()
        faults.append(attrs.evolve(fault, order={**fault.order, **where}))
    return faults


def launches(faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yield the faults of each launch: up to one that ends it."""
    group: list[Fault] = []
    for fault in faults:
        group.append(fault)
        if fault.ends_launch:
            yield group
            group = []
    yield group


@attrs.define
class Soaked:
    """What came of it."""

    outcome: Outcome
    faults: int
    seconds: float
    undisturbed: float
    """Seconds of the run that nobody hurt."""

    @property
    def goodput(self) -> float:
        """The undisturbed run's time over this one's, between 0 and 1."""
        return self.undisturbed / self.seconds

    def text(self) -> str:
        """Return a sentence for the terminal."""
        if self.outcome.problems:
            return f"not survived, after {self.seconds:.0f} s: {'; '.join(self.outcome.problems)}"
        return (
            f"{self.faults} faults in {self.seconds:.0f} s, one every {self.seconds / self.faults:.1f} s; "
            f"{self.outcome.steps_lost} steps lost; goodput {self.goodput:.0%} "
            f"({self.undisturbed:.0f} s undisturbed): it ended with the weights of the undisturbed run"
        )


class Soak(Row):
    """All faults in one run."""

    number, name = "soak", "random faults, one after another"

    def __init__(self, faults: Sequence[Fault], tell: Callable[[str], None]) -> None:
        self.faults, self.tell = faults, tell
        # Each may cost an interval, and the save that was on its way.
        self.lost = 2 * len(faults)  # type: ignore[misc]

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        for number, group in enumerate(launches(self.faults)):
            ended = self._launch(trial, group, resumes=number > 0)
            told = ", ".join(f"{fault.name} at step {fault.order['step']}" for fault in group)
            self.tell(f"launch {number + 1}: exit code {ended.code}; {told or 'no fault'}")
            last = group[-1] if group else None
            expected = last.codes if last is not None and last.ends_launch else (Exit.DONE,)
            if ended.code not in expected:
                said = ended.err[-600:]
                yield f"launch {number + 1}: exit code {ended.code}, expected {expected[0]}: {said}"
                return
            if "Traceback" in ended.err and not any(fault.order["act"] == "fail" for fault in group):
                yield f"launch {number + 1} shows a traceback: {ended.err[-600:]}"
        if (struck := trial.struck()) != len(self.faults):
            yield f"{struck} faults struck, expected {len(self.faults)}"

    def _launch(self, trial: Trial, group: Sequence[Fault], *, resumes: bool) -> Ended:
        first, *later = [dict(fault.order) for fault in group] or [{}]
        restarts = sum(not fault.ends_launch for fault in group)
        words = [*(RESUME if resumes else ()), *(("--max-restarts", f"{restarts}") if restarts else ())]
        process = trial.start(order={**first, "then": later}, words=words)
        kills = bool(group) and group[-1].kills_launcher
        ended = trial.finish(
            process,
            (lambda pid: os.kill(pid, signal.SIGKILL)) if kills else None,
            strikes=len(group),
            limit=trial.bench.settings.limit * (1 + len(group)),
        )
        if kills:
            time.sleep(ORPHANS_END)
        return ended


def soak(bench: Bench, count: int, seed: int) -> int:
    """Print what a run came to that was hurt ``count`` times; return 0, or 1 if it was not survived.

    Raises:
        NanotrainError: the run has too few steps.
    """
    settings = bench.settings
    if settings.steps < (least := settings.every + 2 + 2 * count):
        raise NanotrainError(
            f"--soak {count}: {settings.steps} steps are too few for so many faults after the first "
            f"checkpoint; expected --steps {least} or more"
        )
    soaked = hurt(bench, count, seed=seed, tell=lambda line: print(line, flush=True))
    print(soaked.text())
    return 1 if soaked.outcome.problems else 0


def hurt(bench: Bench, count: int, *, seed: int, tell: Callable[[str], None]) -> Soaked:
    """Train undisturbed, then hurt the same run ``count`` times, and compare. ``tell`` a line a launch."""
    began = time.monotonic()
    assert bench.baseline
    undisturbed = time.monotonic() - began
    random = Random(f"{seed}/soak")
    row, trial = Soak(draw(bench.settings, count, random), tell), Trial(bench, "soak")
    began = time.monotonic()
    outcome = Outcome(list(row.hurt(trial, random)))
    seconds = time.monotonic() - began
    if not outcome.problems:
        judge(row, trial, outcome)
    return Soaked(outcome, count, seconds, undisturbed)
