"""Both monitors keep what monitors promise: no number changes, and a failure does not stop the run."""

import pytest

from nanotrain_core.testing import Case, conformance

EVERYTHING = {"steps": "0:4:2", "what": ["weights", "gradients", "updates", "activations"]}
SUMMED = {"parallel": [{"use": "summed"}]}

test_conformance = conformance(
    Case("monitor", use="dump", config=EVERYTHING, topology={"dp": 2}, overrides=SUMMED, name="tensors"),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
)
test_profiler = conformance(
    Case("monitor", use="profiler", config={"steps": "1:2"}),
    slow=pytest.mark.full,
    # Four seconds of writing traces; it reads no tensor.
    marks={"changes_nothing": pytest.mark.full},
)
# The other form differs in what is written, which tests/test_dump.py compares on eight ranks.
test_exhaustively = pytest.mark.full(
    conformance(Case("monitor", use="dump", config={**EVERYTHING, "form": "statistics"}, name="statistics"))
)
