"""The kernels for a CPU pass the harness that kernels of any kind are asked to pass."""

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("kernels", use="cpu"),
    Case("kernels", use="cpu", config={"shared_memory": False}, name="cpu-sockets"),
)
