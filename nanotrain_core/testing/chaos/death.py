"""Rows in which processes die, hang or are slow."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import ClassVar

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Trial
from nanotrain_core.testing.chaos.row import AGAIN, Row, expect, save_step, some_rank, some_step


class Kill(Row):
    """SIGKILL of one rank at a random step; the launcher restarts all."""

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

    number, name = "2-4", "kill -9 at a random write of a save"

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


class Hang(Row):
    """One rank stops making progress; it is named, all are ended and restarted."""

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
