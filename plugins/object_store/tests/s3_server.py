"""The fixture ``server``: an S3 server on 127.0.0.1."""

import pytest


@pytest.fixture
def server(monkeypatch):
    """Serve S3 on 127.0.0.1, for this process and those that it starts."""
    from nanotrain_core.testing.object_server import ObjectServer

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
