"""Muon passes the harness: the updates of whole matrices on every layout."""

import pytest

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("optimizer", use="muon"),
    Case("optimizer", use="muon", topology={"dp": 2}, overrides={"parallel": [{"use": "ranged"}]}),
    slow=pytest.mark.full,
)
