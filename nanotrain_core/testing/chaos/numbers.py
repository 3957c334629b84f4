"""Rows in which training diverges."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, some_rank, some_step, unsettled_step


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


def left_aside(trial: Trial) -> set[int]:
    """Return the steps whose checkpoints a rollback set aside, and that were not saved again since."""
    found = set[int]()
    for row in trial.rows("rollback", "checkpoint"):
        if row["event"] == "rollback":
            found.update(range(row["restored"] + 1, row["step"] + 1))
        else:
            found.discard(row["step"])
    return found


def taken_since_rollback(trial: Trial) -> dict[int, set[str]]:
    """Return the sequences, by their marks, that each step trained on after the rollback."""
    began = {row["rank"]: row["time"] for row in trial.rows("rollback")}
    found: dict[int, set[str]] = {}
    for row in trial.trained():
        if row["time"] > began[row["rank"]]:
            found.setdefault(row["step"], set()).update(row["rows"])
    return found


class RollsBack(Row):
    """Training diverges; the guard rolls back, and the bad steps' data is skipped."""

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
        left_out = back["step"] - back["onset"] + 1
        order = trial.bench.order_of_data(trial.bench.settings.steps + left_out)
        for step, taken in taken_since_rollback(trial).items():
            if taken != order[step - 1 + left_out * (step >= back["onset"])]:
                yield f"step {step} has other data than what comes once that of the bad steps is left out"
        trial.announced_bad |= left_aside(trial)


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
        trial.announced_bad |= left_aside(trial)


class NanWeights(Row):
    """A weight is NaN in every copy: steps are skipped, nothing is saved, the run is not done."""

    number, name = "37", "a weight turns NaN on all ranks that hold it"
    same_end, lost = False, 1e9  # steps were skipped, with other losses: checkpoints and end are examined

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step, every = some_step(trial, random), trial.bench.settings.every
        order = {"act": "nan_weight", "at": "end", "step": step, "rank": -1, "amount": random.random()}
        yield from expect(trial.launch(order=order), Exit.DIVERGED)
        newest = max(row["step"] for row in trial.rows("checkpoint"))
        if not step - every <= newest <= step:
            yield f"NaN after step {step}, and the newest checkpoint is of step {newest}"
        yield from expect(trial.launch(words=RESUME), Exit.DONE)
        if trial.weights() != trial.bench.baseline.weights():
            yield "the final weights are not those of the undisturbed run"
