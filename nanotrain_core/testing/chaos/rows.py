"""The fault matrix: one small class per fault, which says what is done to a run and what must hold.

A row gets a fresh :class:`~nanotrain_core.testing.chaos.bench.Trial` and a random generator, hurts the
run, and returns the launches. What holds for every row (same final weights as the undisturbed run, the
same sequences at every step, no false success, few steps lost) is judged by :func:`judge`; a row adds
or replaces what is particular to it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import attrs

from nanotrain_core.errors import Exit
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
    same_end: ClassVar[bool] = True
    """Whether the run must end with the weights of the undisturbed one."""
    short: ClassVar[bool] = False
    """Whether it is part of the short form."""

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        """Run, hurt, perhaps run again; yield what is wrong."""
        raise NotImplementedError

    def run(self, bench: Bench, folder: str, random: Random) -> Outcome:
        """Try once."""
        trial = Trial(bench, folder, guard=self.guard)
        outcome = Outcome(list(self.hurt(trial, random)))
        judge(self, trial, outcome)
        return outcome


def judge(row: Row, trial: Trial, outcome: Outcome) -> None:
    """Fill in the figures of a run, and what every row must keep."""
    bench, baseline = trial.bench, trial.bench.baseline
    outcome.steps_lost = trial.steps_lost()
    outcome.detect_s, outcome.recover_s = trial.seconds()
    limit = row.lost * bench.settings.every + trial.on_its_way()
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
    """Yield how a launch ended otherwise than it should."""
    if ended.code != code:
        yield f"exit code {ended.code}, expected {code}: {ended.err.strip()[-400:]}"
    for text in texts:
        if text not in ended.err:
            yield f"stderr does not say {text!r}: {ended.err.strip()[-400:]}"
    if "Traceback" in ended.err:
        yield f"a traceback was shown: {ended.err.strip()[-400:]}"


def some_step(trial: Trial, random: Random) -> int:
    """Return a random step after the first checkpoint and before the last step."""
    return random.randrange(trial.bench.settings.every + 1, trial.bench.settings.steps - 1)


def save_step(trial: Trial, random: Random, *, after: int = 1) -> int:
    """Return a random step, not the last, after which a checkpoint is saved, and ``after`` were before."""
    every, steps = trial.bench.settings.every, trial.bench.settings.steps
    return every * random.randrange(after + 1, (steps - 1) // every + 1)


def unsettled_step(trial: Trial, random: Random) -> int:
    """Return a random step well after the first checkpoint, with time to go wrong and to go back."""
    return random.randrange(trial.bench.settings.every + 3, trial.bench.settings.steps - 6)


def some_rank(trial: Trial, random: Random) -> int:
    return random.randrange(trial.bench.settings.ranks)


# --- death ------------------------------------------------------------------------------------------


class Kill(Row):
    """SIGKILL of one rank at a random step; the launcher starts all again."""

    where: ClassVar[str] = "step"

    def victim(self, trial: Trial, random: Random) -> int:
        return 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        rank = self.victim(trial, random)
        order = {"act": "kill", "at": self.where, "rank": rank, "step": some_step(trial, random)}
        yield from expect(
            trial.launch(order=order, words=AGAIN), Exit.DONE, f"rank {rank} was killed by SIGKILL"
        )


class KillFirst(Kill):
    number, name, short = "1", "kill -9 rank 0", True


class KillSome(Kill):
    number, name = "1", "kill -9 a random rank"

    def victim(self, trial: Trial, random: Random) -> int:
        return some_rank(trial, random)


class KillLast(Kill):
    number, name = "1", "kill -9 the last rank"

    def victim(self, trial: Trial, random: Random) -> int:
        return trial.bench.settings.ranks - 1


class KillInData(KillSome):
    number, name, where = "23", "killed while loading data, as when out of memory", "data"


class KillInSave(Row):
    """SIGKILL at one of the calls that write a checkpoint, or rename it, on a random rank."""

    number, name, short = "2-4", "kill -9 at a random write of a save", True

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        rank = 0 if random.random() < 0.5 else some_rank(trial, random)
        order = {
            "act": "write:kill",
            "rank": rank,
            "step": save_step(trial, random),
            "amount": random.randrange(1, 25),
        }
        yield from expect(trial.launch(order=order, words=AGAIN), Exit.DONE)


class Fail(Row):
    number, name = "1", "an exception in one rank's data loading"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {
            "act": "fail",
            "at": "data",
            "rank": some_rank(trial, random),
            "step": some_step(trial, random),
        }
        ended = trial.launch(order=order, words=AGAIN)
        if ended.code != Exit.DONE or "chaos: this rank fails; restarting (1 of 1)" not in ended.err:
            yield f"exit code {ended.code}: {ended.err[-400:]}"


# --- damage on the disk -----------------------------------------------------------------------------


class Damage(Row):
    """The run dies; a file of its newest checkpoint is damaged; it is resumed from the one before."""

    lost = 2

    def damage(self, path: Path, random: Random) -> None:
        """Do it."""
        raise NotImplementedError

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        every = trial.bench.settings.every
        order = {"act": "kill", "step": save_step(trial, random, after=2) + random.randrange(1, every)}
        yield from expect(trial.launch(order=order), Exit.FAILED)
        newest = trial.checkpoint().steps()[-1]
        path = random.choice(trial.saved_files())
        self.damage(path, random)
        trial.announced_bad.add(newest)
        ended = trial.launch(words=RESUME)
        if ended.code != Exit.DONE:
            yield f"after damage to {path.name}: exit code {ended.code}: {ended.err[-400:]}"
        if path.name.split(".")[0] not in ended.err and f"{newest:08d}" not in ended.err:
            yield f"nobody said that {path.name} was damaged"
        trial.announced_bad.clear()  # it was saved once more, whole


class FlipBit(Damage):
    number, name, short = "5", "one bit of the newest checkpoint flips", True

    def damage(self, path: Path, random: Random) -> None:
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)


class Truncate(Damage):
    number, name = "6", "the newest checkpoint is cut short"

    def damage(self, path: Path, random: Random) -> None:
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.truncate(random.randrange(size))


class Empty(Damage):
    number, name = "6", "a file of the newest checkpoint is empty"

    def damage(self, path: Path, random: Random) -> None:
        path.write_bytes(b"")


class DiskFull(Row):
    number, name, short = "7", "disk full on one rank during a save", True
    lost = 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step = save_step(trial, random)
        order = {
            "act": "full",
            "step": step,
            "last": step + 2,
            "rank": self.rank(trial, random),
            "amount": 200_000,
        }
        ended = trial.launch(order=order)
        yield from expect(ended, Exit.DONE)
        saved = {row["step"] for row in trial.rows("checkpoint")}
        if order["rank"] == 0 and step in saved:
            yield f"the checkpoint of step {step} was announced though there was no space"

    def rank(self, trial: Trial, random: Random) -> int:
        return 0


class Vanish(Row):
    number, name = "8", "the folder of checkpoints vanishes"
    lost = 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step = some_step(trial, random)
        trial.announced_bad.update(range(step + 1))
        order = {"act": "vanish", "step": step}
        yield from expect(trial.launch(order=order), Exit.DONE)


class LogFull(Row):
    number, name = "25", "no space for metrics.jsonl"
    lost = 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        trial.folder.mkdir()
        (trial.folder / "metrics.jsonl").symlink_to("/dev/full")
        ended = trial.launch(words=RESUME)
        if ended.code != Exit.DONE:
            yield f"exit code {ended.code}: {ended.err[-400:]}"


# --- signals ----------------------------------------------------------------------------------------


class Terminate(Row):
    """SIGTERM; the run saves and says 75, and goes on when it is started again."""

    lost = 0
    order: ClassVar[dict[str, Any]] = {"act": "sleep", "amount": 1.0}
    at: ClassVar[str] = "step"

    def when(self, trial: Trial, random: Random) -> int:
        return some_step(trial, random)

    def signal(self, launcher: int) -> None:
        """Send what is to be sent."""
        import os

        os.kill(launcher, signal.SIGTERM)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {
            **self.order,
            "at": self.at,
            "step": self.when(trial, random),
            "rank": some_rank(trial, random),
        }
        yield from expect(trial.launch(order=order, on_fault=self.signal), Exit.PREEMPTED)
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class TerminateLauncher(Terminate):
    number, name, short = "9", "SIGTERM to the launcher", True


class TerminateRank(Terminate):
    number, name = "9", "SIGTERM to one rank only"
    order: ClassVar[dict[str, Any]] = {"act": "terminate"}

    def signal(self, launcher: int) -> None:
        """The rank has sent it to itself."""


class TerminateInData(Terminate):
    number, name, at = "10", "SIGTERM while waiting for data", "data"


class TerminateInEvaluation(Terminate):
    number, name, at = "10", "SIGTERM during evaluation", "evaluation"

    def when(self, trial: Trial, random: Random) -> int:
        return save_step(trial, random)  # evaluations are as frequent


class TerminateInSave(Terminate):
    number, name = "10", "SIGTERM during a save"
    order: ClassVar[dict[str, Any]] = {"act": "write:signal", "amount": 3}

    def when(self, trial: Trial, random: Random) -> int:
        return save_step(trial, random)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {**self.order, "step": self.when(trial, random), "rank": 0}
        yield from expect(trial.launch(order=order, on_fault=self.signal), Exit.PREEMPTED)
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class TerminateAtStart(Terminate):
    number, name, at = "10", "SIGTERM before the first step", "start"

    def when(self, trial: Trial, random: Random) -> int:
        return 0


class TerminateTwice(Terminate):
    number, name, lost = "11", "two SIGTERMs", 1
    order: ClassVar[dict[str, Any]] = {"act": "sleep", "amount": 60.0}

    def signal(self, launcher: int) -> None:
        """Send both, while a rank sleeps."""
        super().signal(launcher)
        time.sleep(1.0)
        super().signal(launcher)


# --- no progress ------------------------------------------------------------------------------------


class Hang(Row):
    """One rank stops making progress; it is named, all are ended and started again."""

    act: ClassVar[str]

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        rank = some_rank(trial, random)
        order = {"act": self.act, "amount": 1e5, "rank": rank, "step": some_step(trial, random), "at": "data"}
        yield from expect(trial.launch(order=order, words=AGAIN), Exit.DONE, f"rank {rank} hung: no progress")
        if not list(trial.folder.glob("stacks/*/rank-0.txt")):
            yield "no stacks were kept"


class HangAsleep(Hang):
    number, name, act = "12", "a rank sleeps", "sleep"


class HangStopped(Hang):
    number, name, act, short = "12", "a rank is stopped (SIGSTOP)", "stop", True


class Slow(Row):
    number, name, lost = "13", "a slow rank is named and left alone", 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step, rank = some_step(trial, random), some_rank(trial, random)
        order = {"act": "sleep", "at": "data", "rank": rank, "step": step, "last": step + 2}
        ended = trial.launch(order={**order, "amount": trial.bench.settings.hang_timeout / 4})
        yield from expect(ended, Exit.DONE, f"rank {rank} is slow: others wait for its data")
        if len(trial.faults()) != 3:
            yield f"{len(trial.faults())} slow steps, expected 3"


# --- numbers ----------------------------------------------------------------------------------------


class NanOnce(Row):
    number, name, guard, short = "14", "NaN in one rank's gradient, once", True, True
    same_end, lost = False, 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step = some_step(trial, random)
        order = {"act": "nan", "step": step, "rank": some_rank(trial, random)}
        yield from expect(trial.launch(order=order), Exit.DONE)
        skipped = {(row["rank"], row["step"]) for row in trial.rows("step") if row["skipped"]}
        if skipped != {(rank, step) for rank in range(trial.bench.settings.ranks)}:
            yield f"skipped (rank, step) {sorted(skipped)}, expected step {step} on all ranks"
        if len(set(trial.weights().values())) != len(set(trial.bench.baseline.weights().values())):
            yield "replicas differ at the end"


class RollsBack(Row):
    """Training goes wrong; the guard goes back to before, and the bad steps' data is left out."""

    guard, same_end = True, False
    lost = 1e9  # what was undone is not lost but unwanted

    def order(self, step: int, trial: Trial, random: Random) -> dict[str, Any]:
        raise NotImplementedError

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step = unsettled_step(trial, random)
        yield from expect(trial.launch(order=self.order(step, trial, random)), Exit.DONE)
        backs = [row for row in trial.rows("rollback") if row["rank"] == 0]
        if len(backs) != 1:
            yield f"{len(backs)} rollbacks, expected 1"
            return
        (back,) = backs
        if not back["restored"] < back["onset"] <= step:
            yield f"went back to {back['restored']} with onset {back['onset']}; the fault was at step {step}"
        left_out = set[str]().union(
            *(trial.bench.baseline.committed()[s] for s in range(back["onset"], back["step"] + 1))
        )
        after = [
            row for row in trial.trained() if row["time"] > back["time"] and row["step"] >= back["onset"]
        ]
        taken = {mark for row in after for mark in row["rows"]}
        if left_out & taken:
            yield "the data of the bad steps was trained on again"
        trial.announced_bad.update(range(back["restored"] + 1, back["step"] + 1))


class NanForAWhile(RollsBack):
    number, name = "15", "NaN for 3 steps in a row"

    def order(self, step: int, trial: Trial, random: Random) -> dict[str, Any]:
        return {"act": "nan", "step": step, "last": step + 2, "rank": some_rank(trial, random)}


class Spike(RollsBack):
    number, name = "15", "the learning rate of one step is multiplied by 1000"

    def order(self, step: int, trial: Trial, random: Random) -> dict[str, Any]:
        return {"act": "rate", "step": step, "rank": -1, "amount": 1000.0}


class NanForever(Row):
    number, name, guard = "15", "NaN from a step on, for ever", True
    same_end, lost = False, 1e9

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {"act": "nan", "step": unsettled_step(trial, random), "last": 10**6, "amount": -1.0}
        yield from expect(trial.launch(order=order), Exit.DIVERGED, "given up after 3 rollbacks")


class FlipWeight(Row):
    number, name, same_end, lost = "16", "one bit of one replica's weights flips", False, 0
    least_ranks = 2

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        rank, ranks = some_rank(trial, random), trial.bench.settings.ranks
        step = some_step(trial, random)
        ended = trial.launch(order={"act": "flip", "step": step, "rank": rank})
        if ended.code == Exit.DONE and trial.weights() == trial.bench.baseline.weights():
            return  # the rank got the right bits from another, as where each updates a share for all
        yield from expect(ended, Exit.CORRUPTED, "has other bits on rank")
        if ranks > 2 and f"has other bits on rank {rank} than on" not in ended.err:
            yield f"rank {rank} was not named: {ended.err[-300:]}"
        last = max(trial.losses())
        if last > step + 2:
            yield f"found at step {last}, flipped at {step}, compared every 2"


# --- mistakes ---------------------------------------------------------------------------------------


class OtherData(Row):
    number, name = "17", "resumed with other data"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        yield from expect(trial.launch(order={"act": "kill", "step": some_step(trial, random)}), Exit.FAILED)
        other = trial.launch(words=RESUME, more=("run.seed=4321",))
        yield from expect(other, Exit.USER, "other data")
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class BadRecipe(Row):
    number, name, same_end, short = "18", "a misspelt key", False, True

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        ended = trial.launch(more=("run.stpes=3",))
        yield from expect(ended, Exit.USER, "unknown key 'stpes' (did you mean 'steps'?)")
        if trial.rows("start"):
            yield "ranks were started"


class OtherLayout(Row):
    """Dies on n ranks, goes on with another number."""

    number, name, same_end = "19", "resumed on another number of ranks", False
    least_ranks = 2

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        yield from expect(trial.launch(order={"act": "kill", "step": some_step(trial, random)}), Exit.FAILED)
        yield from expect(trial.launch(words=RESUME, ranks=self.other(trial)), Exit.DONE)
        expected, found = trial.bench.baseline.committed(), trial.committed()
        if expected != found:
            yield f"other sequences at steps {[s for s in expected if expected[s] != found.get(s)]}"
        theirs, ours = (
            max(float.fromhex(x) for x in t.losses()[trial.bench.settings.steps])
            for t in (trial.bench.baseline, trial)
        )
        if abs(theirs - ours) > 1e-2 * abs(theirs):
            yield f"the last loss is {ours}, undisturbed {theirs}"

    def other(self, trial: Trial) -> int:
        """Return the fewest ranks that the degrees allow, or twice as many if there are no fewer."""
        topology, ranks = trial.bench.recipe().topology.config, trial.bench.settings.ranks
        fewest = prod(getattr(topology, dim, 1) for dim in ("pp", "cp", "tp"))
        return fewest if fewest < ranks else 2 * ranks


class TwoRuns(Row):
    number, name, lost = "20", "a second run in the same folder", 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {"act": "sleep", "step": some_step(trial, random), "amount": 8.0}
        second: list[Ended] = []

        def intrude(launcher: int) -> None:
            other = trial.bench.root / f"{trial.home.name}-second"
            intruder = Trial(trial.bench, other.name)
            intruder.folder = trial.folder
            second.append(intruder.launch(words=RESUME))

        yield from expect(trial.launch(order=order, on_fault=intrude), Exit.DONE)
        for ended in second:
            yield from expect(ended, Exit.LOCKED, "is in use by another run: process ")
        if not second:
            yield "there was no second run"


class StaleLock(Row):
    number, name = "21", "kill -9 of the launcher leaves its lock"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        import os

        order = {"act": "sleep", "step": some_step(trial, random), "amount": 2.0, "rank": -1}
        ended = trial.launch(order=order, on_fault=lambda pid: os.kill(pid, signal.SIGKILL))
        if ended.code != -signal.SIGKILL:
            yield f"the launcher ended with {ended.code}"
        time.sleep(2.0)  # its ranks end by themselves
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


ROWS: tuple[type[Row], ...] = (
    *(KillFirst, KillSome, KillLast, Fail, KillInSave, FlipBit, Truncate, Empty, DiskFull, Vanish),
    *(TerminateLauncher, TerminateRank, TerminateInData, TerminateInEvaluation, TerminateInSave),
    *(TerminateAtStart, TerminateTwice, HangAsleep, HangStopped, Slow, NanOnce, NanForAWhile, Spike),
    *(NanForever, FlipWeight, OtherData, BadRecipe, OtherLayout, TwoRuns, StaleLock, KillInData, LogFull),
)

#: Rows of the matrix that are not tried, and why.
NOT_RUN = {
    "8 read-only folder": "root may write everywhere; others are refused before a rank starts",
    "22 port busy": "the ranks of one host meet in a file: there is no port",
    "24 tracker offline": "no component talks to a tracker",
    "25 clock jump": "the machine's clock is not ours to set; all waiting is by the monotonic clock",
}


def chosen(only: Sequence[str], *, short: bool) -> list[type[Row]]:
    """Return the rows whose number or name has one of ``only`` in it."""
    rows = [row for row in ROWS if row.short or not short]
    return [r for r in rows if not only or any(w == r.number or w.lower() in r.name.lower() for w in only)]
