"""The kernels for a CPU pass the harness that kernels of any kind are asked to pass."""

import pytest

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(Case("kernels", use="cpu"))
# The first tier has the exchanges over sockets of the core's `torch`.
test_exhaustively = pytest.mark.full(
    conformance(Case("kernels", use="cpu", config={"shared_memory": False}, name="cpu-sockets"))
)
