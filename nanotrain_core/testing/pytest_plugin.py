"""Loaded by pytest wherever nanotrain is installed: ends the session's pools. Never imports torch."""

from __future__ import annotations

import sys


def pytest_sessionfinish() -> None:
    """Kill the worker processes, if this session ever used any."""
    pool = sys.modules.get("nanotrain_core.testing.pool")
    if pool is not None:
        pool.close_pools()
