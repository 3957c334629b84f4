"""What a plan of DeepSeek-V3 on 2048 ranks takes, and a sweep of 500 layouts of it: seconds and memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from statistics import median
from typing import Any

import attrs

from benchmarks.report import spread, verdict
from benchmarks.startup import NANOTRAIN, ROOT

PLAN = ("plan", "recipes/deepseek_v3_671b.toml", "--hardware", "h800")


@attrs.define(frozen=True)
class Turn:
    """One command, from its start to its end."""

    seconds: float
    processor: float
    """Seconds of all its processes, which other work on the machine changes less."""
    gib: float
    """2^30 bytes that its largest process held at most."""


@attrs.define(frozen=True)
class Planning:
    """A command and its bars."""

    KIND = "planning"
    TITLE = "Plans of 671B parameters on 2048 ranks: medians, and the most memory of a process."
    HEADER = ("command", "seconds", "spread", "limit", "of processors", "GiB", "limit of GiB", "")

    command: str
    limit: float
    """Seconds."""
    limit_gib: float
    turns: tuple[Turn, ...]

    @property
    def passed(self) -> bool:
        return self._median("seconds") < self.limit and self.gib < self.limit_gib

    @property
    def gib(self) -> float:
        """Of the turn with most."""
        return max(turn.gib for turn in self.turns)

    def _median(self, name: str) -> float:
        return median(getattr(turn, name) for turn in self.turns)

    def row(self) -> list[str]:
        seconds = self._median("seconds")
        around = spread((turn.seconds for turn in self.turns), ".1f")
        times = [f"{seconds:.1f}", around, f"{self.limit:g}", f"{self._median('processor'):.1f}"]
        memory = [f"{self.gib:.2f}", f"{self.limit_gib:g}"]
        return [f"`{self.command}`", *times, *memory, verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


def measure(*, rounds: int) -> list[Planning]:
    """Plan three times at most, and sweep once; a first plan, not counted, leaves compiled bytecode."""
    alone, swept = PLAN, (*PLAN, "--sweep")
    with tempfile.TemporaryDirectory() as bytecode:
        turn(bytecode, *alone)
        return [
            Planning(
                f"nanotrain {' '.join(words)}",
                limit,
                2.0,
                tuple(turn(bytecode, *words, "--json") for _ in range(number)),
            )
            for words, limit, number in ((alone, 10.0, min(rounds, 3)), (swept, 120.0, 1))
        ]


def turn(bytecode: str, *words: str) -> Turn:
    """Run a command of ``nanotrain``.

    Args:
        bytecode: the folder of Python's compiled files, which an installed package has beside its sources.
        words: the command's arguments.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command, began = [*NANOTRAIN, *words], time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Turn(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)
