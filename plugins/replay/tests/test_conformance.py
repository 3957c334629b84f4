"""With and without the monitor a run has the same bits: a replay leaves no trace in the step."""

import pytest

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("monitor", use="replay", config={"every": 2}),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
)
