"""Loaded by pytest wherever nanotrain is installed: ends the session's pools. Never imports torch."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a slow or busy machine give ranks more time before they count as hung."""
    parser.getgroup("nanotrain").addoption(
        "--rank-timeout", type=float, metavar="SECONDS", help="until ranks of a test count as hung (60)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell the pools, which know nothing of pytest."""
    seconds = config.getoption("--rank-timeout")
    if seconds is not None:
        from nanotrain_core.testing.pool import RANK_TIMEOUT

        os.environ[RANK_TIMEOUT] = str(seconds)


def pytest_sessionfinish() -> None:
    """Kill the worker processes, if this session ever used any."""
    pool = sys.modules.get("nanotrain_core.testing.pool")
    if pool is not None:
        pool.close_pools()
