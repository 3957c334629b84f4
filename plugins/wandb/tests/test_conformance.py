import pytest

from nanotrain_core.testing import Case, conformance


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


test_conformance = conformance(
    Case("monitor", use="wandb"),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
    # It has tests/test_all_sinks.py instead.
    marks={"changes_nothing": pytest.mark.full},
)
