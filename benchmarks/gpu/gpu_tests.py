"""All tests that need or use a GPU, in one call of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import only_gpu_tests
from benchmarks.gpu.records import Recorder, last_lines, read
from benchmarks.gpu.settings import Settings

ROOT = Path(__file__).parents[2]
#: Processes that share the GPU.
WORKERS = 8


def run(settings: Settings, root: Path = ROOT) -> None:
    """Run them; count how they ended, by file, and tell of each that failed."""
    record = Recorder(settings.records)
    files = only_gpu_tests.files(root)
    ends = settings.records.with_suffix(".tests")
    ends.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.only_gpu_tests", "-p", "no:cacheprovider"]
    words += ["-q", "--tb=short", "--continue-on-collection-errors"]
    if find_spec("xdist") and not settings.smoke:
        words += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist=worksteal"]
    environment = {**os.environ, only_gpu_tests.RECORDS: str(ends)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.pop("PYTEST_XDIST_WORKER", None)  # where this itself is tested by several processes
    timed_out = False
    try:
        limit = None if settings.left == float("inf") else max(5.0, settings.left - 5)
        done = subprocess.run(
            [*words, *map(str, files)],
            cwd=root,
            env=environment,
            check=False,
            timeout=limit,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout)
    except subprocess.TimeoutExpired as late:
        timed_out, done = True, None
        print(late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout)
    found = list({each["value"][0]: each["value"] for each in read(ends)}.values())
    counts = {file: Counter[str]() for file in sorted({name.partition("::")[0] for name, _, _ in found})}
    for name, outcome, text in found:
        counts[name.partition("::")[0]][outcome] += 1
        if outcome == "failed":
            record.problem(name, last_lines(text))
    for file, count in counts.items():
        row = {outcome: count[outcome] for outcome in ("passed", "failed", "skipped")}
        record.row("tests on this GPU", ok=not count["failed"], file=file, **row)
    if timed_out:
        record.problem("tests", f"pytest was ended after {limit:.0f} s, {len(found)} tests had run")
    elif done is not None and done.returncode not in (0, 1 if found else 0, 5):
        # 1: tests failed, or pytest could not begin; 5: none were selected
        record.problem("tests", f"pytest ended with {done.returncode}: {last_lines(done.stdout)}")
    elif not found:
        record.left_out("tests", "none needs a GPU")
