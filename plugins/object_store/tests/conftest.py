"""Lets test files import small_runs from beside them, whichever way pytest imports them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def server(monkeypatch):
    """Serve S3 on 127.0.0.1, for this process and those that it starts."""
    from nanotrain_core.testing.object_server import ObjectServer

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
