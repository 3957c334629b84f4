import pytest

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("monitor", use="alerts"),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
    # It has tests/test_all_sinks.py instead.
    marks={"changes_nothing": pytest.mark.full},
)
