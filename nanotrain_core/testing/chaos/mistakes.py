"""Rows in which a run is started or restarted with invalid or with different settings."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from math import prod
from random import Random

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Ended, Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, some_step


class OtherData(Row):
    number, name = "17", "resumed with other data"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        # The second save waits for the first, which is there from then on.
        order = {"act": "kill", "step": some_step(trial, random, after=2)}
        yield from expect(trial.launch(order=order), Exit.FAILED)
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
    """Dies on n ranks, resumes with another number."""

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
        pause = min(8.0, 0.7 * trial.bench.settings.hang_timeout)  # a longer one would count as a hang
        order = {"act": "sleep", "step": some_step(trial, random), "amount": pause}
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

        order = {"act": "sleep", "step": some_step(trial, random), "amount": 2.0, "rank": -1}
        ended = trial.launch(order=order, on_fault=lambda pid: os.kill(pid, signal.SIGKILL))
        if ended.code != -signal.SIGKILL:
            yield f"the launcher ended with {ended.code}"
        time.sleep(2.0)  # its ranks end by themselves
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class Zombie(Row):
    """The launcher is killed and nobody reaps it, as in a container whose first process waits for nobody."""

    number, name = "29", "kill -9 of the launcher, which stays a zombie"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {"act": "sleep", "step": some_step(trial, random), "amount": 2.0, "rank": -1}
        launcher, began = trial.start(order=order), time.time()
        try:
            while not trial.struck() and time.time() < began + trial.bench.settings.limit:
                time.sleep(0.05)
            launcher.kill()
            yield from expect(trial.launch(words=RESUME), Exit.DONE)
        finally:
            trial.finish(launcher)
