"""Rows in which files are damaged, or the disk is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, save_step, some_step


class Damage(Row):
    """The run dies; a file of its newest checkpoint is damaged; it resumes from the previous one."""

    lost = 2

    def damage(self, path: Path, random: Random) -> None:
        """Damage the file."""
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
    number, name = "7", "disk full on one rank during a save"
    lost = 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        step = save_step(trial, random)
        room = max(path.stat().st_size for path in trial.bench.baseline.saved_files()) // 2
        # Rank 0, since every format has it write something.
        ended = trial.launch(order={"act": "full", "step": step, "last": step + 2, "rank": 0, "amount": room})
        yield from expect(ended, Exit.DONE)
        saved = {row["step"] for row in trial.rows("checkpoint")}
        if step in saved:
            yield f"the checkpoint of step {step} was announced though there was no space"
        if step not in saved and step not in {row["step"] for row in trial.rows("save_failed")}:
            yield f"no monitor was told that step {step} could not be saved"


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
