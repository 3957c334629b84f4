"""What ``python -m benchmarks conformance`` reads from the command's own results."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import conformance


@pytest.mark.parametrize(
    ("verdicts", "seconds", "row"),
    [
        (["passed", "passed", "skipped"], 100.0, ["2", "0", "1", "100", "pass"]),
        (["passed", "failed"], 100.0, ["2", "1", "0", "100", "FAIL"]),
        (["passed"], 181.0, ["1", "0", "0", "181", "FAIL"]),
    ],
    ids=["all-passed", "one-failed", "too-slow"],
)
def test_a_row_counts_verdicts_and_holds_the_limit(monkeypatch, verdicts, seconds, row):
    results = [{"verdict": verdict} for verdict in verdicts]
    told = json.dumps({"failed": verdicts.count("failed"), "results": results})
    monkeypatch.setattr(conformance.subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=told))
    clock = iter([0.0, seconds])
    monkeypatch.setattr(conformance.time, "perf_counter", lambda: next(clock))
    assert conformance.check("topology:grid").row() == ["`topology:grid`", *row]
