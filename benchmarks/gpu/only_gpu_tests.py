"""A pytest plugin: keep the tests that need or use a GPU, and write down how each ended as soon as it has.

Such are the tests marked ``gpu``, and those skipped where torch finds no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.records import Recorder

#: Names the file for the records.
RECORDS = "NANOTRAIN_GPU_TEST_RECORDS"
#: What of a test file says that some of its tests are such.
SIGNS = ("mark.gpu", "torch.cuda.is_available()")


def files(root: Path) -> list[Path]:
    """Return the test files that have such tests."""
    found = [*root.glob("tests/test_*.py"), *root.glob("plugins/*/tests/test_*.py")]
    return sorted(path for path in found if any(sign in path.read_text(encoding="utf-8") for sign in SIGNS))


def needs_gpu(item: pytest.Item) -> bool:
    """Return whether a test is one of these."""
    if item.get_closest_marker("gpu"):
        return True
    reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
    return any("no GPU" in reason or "CUDA" in reason for reason in reasons)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all others."""
    kept = [item for item in items if needs_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Iterator[None]:
    """Record a test's end: of its call, or of the phase before or after it that did not pass."""
    yield
    ended = report.when == "call" or report.outcome != "passed"
    if ended and "PYTEST_XDIST_WORKER" not in os.environ and RECORDS in os.environ:
        text = report.longreprtext if report.failed else ""
        Recorder(Path(os.environ[RECORDS])).data("test", [report.nodeid, report.outcome, text])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be read as a test that failed."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ and RECORDS in os.environ:
        Recorder(Path(os.environ[RECORDS])).data("test", [report.nodeid, "failed", report.longreprtext])
