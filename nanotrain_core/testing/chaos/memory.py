"""Rows in which ranks resume from the monitor ``memory_snapshots``: at most one step is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import ClassVar

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Trial
from nanotrain_core.testing.chaos.row import AGAIN, Row, expect, some_rank, some_step

#: The monitor that keeps them.
MONITOR = "memory_snapshots"
#: Where Linux has files in memory.
SHARED_MEMORY = "/dev/shm"


#: One of these is said. A checkpoint may be of a later step than what all ranks have in memory.
RESTORED = ("restored from memory", "no snapshot as new as the checkpoint")


class MemoryRow(Row):
    """SIGKILL of a rank at a random step, as in row 1, but with snapshots."""

    lost, steps = 0, 1
    harm: ClassVar[str] = ""
    """What happens first to the snapshots of the rank that is killed: they are ``gone``, or ``flipped``."""
    changes: ClassVar[tuple[str, ...]] = ()
    """To the recipe."""
    least_ranks = 2

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        if MONITOR not in bench.registry.names("monitor"):
            return f"the monitor {MONITOR} is not installed"
        return "" if Path(SHARED_MEMORY).is_dir() else f"there is no {SHARED_MEMORY}"

    def victim(self, trial: Trial, random: Random) -> int:
        """Return which rank is killed."""
        return some_rank(trial, random)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="nanotrain-chaos-", dir=SHARED_MEMORY) as memory:
            trial.monitors = [f'{{use="{MONITOR}", folder="{memory}"}}']
            rank, at = self.victim(trial, random), random.choice(["step", "data"])
            order = {"act": "kill", "at": at, "rank": rank, "step": some_step(trial, random)}
            if self.harm:
                order |= {"harm": self.harm, "memory": memory}
            ended = trial.launch(order=order, words=AGAIN, more=self.changes)
            yield from expect(ended, Exit.DONE, f"rank {rank} was killed by SIGKILL")
            if not any(text in ended.err for text in RESTORED):
                yield f"stderr says none of {RESTORED}: {ended.err.strip()[-400:]}"
            if left := [path.name for path in Path(memory).iterdir()]:
                yield f"snapshots are left after the end: {', '.join(left)}"


class KillBesideMemory(MemoryRow):
    number, name, short = "28", "own memory: kill -9 a random rank", True


class MemoryGone(MemoryRow):
    number, name = "28", "neighbor memory: kill -9 a random rank, whose snapshots are lost with it"
    harm = "gone"


class MemoryFlipped(MemoryRow):
    """The newest of its snapshots that it has itself."""

    number, name = "28", "neighbor memory: kill -9 a random rank, whose newest snapshot has a flipped bit"
    harm = "flipped"


class KillInProcess(MemoryRow):
    """The other ranks keep their processes."""

    number, name = "28", "in-process restart: kill -9 a random rank"
    changes = ("run.in_process_restart=true",)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        yield from super().hurt(trial, random)
        killed = {row["rank"] for row in trial.rows("fault")}
        by_rank: dict[int, list[int]] = {}
        for row in trial.rows("start"):
            by_rank.setdefault(row["rank"], []).append(row["pid"])
        for rank, pids in by_rank.items():
            if len(pids) != 2 or (pids[0] == pids[1]) == (rank in killed):
                yield f"rank {rank} had the processes {pids}, and {sorted(killed)} were killed"
