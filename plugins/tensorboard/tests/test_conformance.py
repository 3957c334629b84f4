import pytest

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("monitor", use="tensorboard"),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
)
