"""How long an author waits: ``nanotrain conformance`` with no options, for a large component of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import attrs

from benchmarks.report import verdict
from benchmarks.startup import NANOTRAIN, ROOT

#: Of every kind the component whose full set takes longest, or nearly so.
COMPONENTS = (
    "topology:grid",
    "kernels:cpu",
    "model:deepseek",
    "parallel:ddp",
    "schedule:1f1b",
    "optimizer:zero12",
    "precision:fp8_deepseek_v3",
    "checkpoint:sharded_v2",
    "data:shards",
    "monitor:health",
)
#: Seconds.
LIMIT = 180.0


@attrs.define(frozen=True)
class FullSet:
    """One component's checks in all of its variants."""

    KIND = "conformance"
    TITLE = f"Full sets of checks of one component, of which each has a limit of {LIMIT:g} seconds."
    HEADER = ("component", "checks", "failed", "skipped", "seconds", "")

    component: str
    checks: int
    failed: int
    skipped: int
    seconds: float

    @property
    def passed(self) -> bool:
        return self.seconds < LIMIT and not self.failed

    def row(self) -> list[str]:
        counts = [str(number) for number in (self.checks, self.failed, self.skipped)]
        return [f"`{self.component}`", *counts, f"{self.seconds:.0f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


def measure() -> list[FullSet]:
    """Check every component once, from the command to its end."""
    return [check(component) for component in COMPONENTS]


def check(component: str) -> FullSet:
    """Check one component, with as many jobs as its command chooses.

    Raises:
        ValueError: the command printed no results.
    """
    print(f"full set of {component}", file=sys.stderr, flush=True)
    command, began = [*NANOTRAIN, "conformance", component, "--json"], time.perf_counter()
    ended = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    found = json.loads(ended.stdout)
    verdicts = [result["verdict"] for result in found["results"]]
    skipped = verdicts.count("skipped")
    return FullSet(
        component=component,
        checks=len(verdicts) - skipped,
        failed=found["failed"],
        skipped=skipped,
        seconds=seconds,
    )
