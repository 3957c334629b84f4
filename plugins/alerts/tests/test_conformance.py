from nanotrain_core.testing import Case, conformance

test_conformance = conformance(Case("monitor", use="alerts"))
