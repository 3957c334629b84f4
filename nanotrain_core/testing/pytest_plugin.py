"""Loaded by pytest wherever nanotrain is installed: ends the session's pools. Never imports torch."""

from __future__ import annotations

import os
import sys

import pytest

from nanotrain_core.launch.environment import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a slow or busy machine give ranks more time before they count as hung, or run fewer checks."""
    group = parser.getgroup("nanotrain")
    group.addoption(
        "--rank-timeout", type=float, metavar="SECONDS", help="until ranks of a test count as hung (60)"
    )
    group.addoption(
        "--collective-checks",
        choices=["on", "off"],
        help="whether torch compares every collective between ranks (on); without, ranks that call different "
        "ones hang, and tests take about half as long",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Configure the pools, which do not know pytest, and share the cores among pytest-xdist's workers."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is not None:  # threads of more processes than cores wait for one another: half the speed
        os.environ.setdefault("OMP_NUM_THREADS", str(Ranks(local_world_size=int(workers)).threads()))
    seconds, checks = config.getoption("--rank-timeout"), config.getoption("--collective-checks")
    if seconds is not None or checks is not None:
        from nanotrain_core.testing.pool import COLLECTIVE_CHECKS, RANK_TIMEOUT

        chosen = {RANK_TIMEOUT: seconds, COLLECTIVE_CHECKS: checks}
        os.environ.update({name: str(value) for name, value in chosen.items() if value is not None})


def pytest_sessionfinish() -> None:
    """Kill the worker processes, if this session ever used any."""
    pool = sys.modules.get("nanotrain_core.testing.pool")
    if pool is not None:
        pool.close_pools()
