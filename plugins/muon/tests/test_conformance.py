"""Muon passes the harness: the updates of whole matrices, on every layout."""

import pytest

from nanotrain_core.testing import Case, conformance

RANGED = {"parallel": [{"use": "ranged"}]}

test_conformance = conformance(Case("optimizer", use="muon"), slow=pytest.mark.full)
# All keys, on every layout of the harness.
test_exhaustively = pytest.mark.full(
    conformance(
        *(
            Case("optimizer", use="muon", config=config, topology={"dp": dp}, overrides=around)
            for config in (
                {},
                {"scale": "original", "adamw_lr_ratio": 0.1},
                {"nesterov": False},
                {"momentum": 0.0},
                {"share_replicas": True},
            )
            for dp, around in ((1, {}), (2, {"parallel": [{"use": "summed"}]}), (4, RANGED))
        )
    )
)
