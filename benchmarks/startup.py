"""How long a user waits: for the commands that only look, and for the first step of a run."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from benchmarks.report import spread, verdict

ROOT = Path(__file__).parents[1]

#: The console's first report, as a line of ``key=value`` or a row of its table.
FIRST_STEP = re.compile(r"(step=|\s*)1/\d+\s")

NANOTRAIN = (sys.executable, "-m", "nanotrain_core.cli")


@attrs.define(frozen=True)
class Wait:
    """Seconds from the command to its end, or to its first training step."""

    KIND = "startup"
    TITLE = "Seconds, medians."
    HEADER = ("command", "until", "seconds", "spread", "limit", "")

    command: str
    until: str
    limit: float
    seconds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return median(self.seconds) < self.limit

    def row(self) -> list[str]:
        middle = median(self.seconds)
        form = ".2f" if middle >= 0.01 else ".4f"
        numbers = [f"{middle:{form}}", spread(self.seconds, form), f"{self.limit:g}"]
        return [f"`{self.command}`", self.until, *numbers, verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


def measure(*, rounds: int) -> list[Wait]:
    """Time every command ``rounds`` times, the training run three times at most."""
    drawn = ["schedule", "dualpipe_v", "--pp", "16", "--microbatches", "60"]
    looks = [
        (["--help"], 0.2),
        (["plugins"], 0.5),
        (["check", "recipes/capstone.toml"], 0.5),
        (drawn, 0.5),
    ]
    waits = []
    for arguments, limit in looks:
        seconds = tuple(until_end(arguments) for _ in range(rounds))
        waits.append(Wait(f"nanotrain {' '.join(arguments)}", "end", limit, seconds))
    seconds = tuple(until_first_step("recipes/capstone.toml") for _ in range(min(rounds, 3)))
    return [*waits, Wait("nanotrain run recipes/capstone.toml", "first step", 15.0, seconds)]


def until_end(arguments: list[str]) -> float:
    """Run a command and return its seconds.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    began = time.perf_counter()
    subprocess.run([*NANOTRAIN, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def until_first_step(recipe: str) -> float:
    """Train and return the seconds until the console reported a step.

    Raises:
        RuntimeError: no step was reported.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*NANOTRAIN, "run", recipe, "--folder", f"{folder}/run"]
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            lines = []
            for line in run.stdout:
                lines.append(line)
                if FIRST_STEP.match(line):
                    seconds = time.perf_counter() - began
                    run.stdout.read()
                    return seconds
    raise RuntimeError(f"{' '.join(command)} reported no step:\n{''.join(lines)}")
