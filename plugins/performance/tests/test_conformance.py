"""The monitors keep what a monitor promises: a run has the same bits with and without them."""

import pytest

from nanotrain_core.testing import Case, conformance

OVERRIDES = {"parallel": [{"use": "summed"}]}
DP = {"topology": {"dp": 2}, "overrides": OVERRIDES}

test_conformance = conformance(
    Case("monitor", use="throughput", config={"peak_tflops": 0.1}, **DP),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
)
test_exhaustively = pytest.mark.full(
    conformance(
        Case("monitor", use="goodput"),
        Case("monitor", use="memory", config={"account_every": 1}, **DP),
        Case("monitor", use="pipeline", **DP),
        Case("monitor", use="goodput", **DP),
        Case("monitor", use="device", **DP),
    )
)
