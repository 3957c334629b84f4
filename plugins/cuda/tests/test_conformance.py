"""The kernels pass the harness that kernels of any kind are asked to pass; on a CPU they index."""

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(Case("kernels", use="cuda"))
