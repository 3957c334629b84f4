"""Small models of V3's and of V2's shape pass the harness."""

import pytest
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("model", use="deepseek", config=V3, name="v3"),
    Case("model", use="deepseek", config=V2, name="v2"),
)

OTHERS = {
    "no-shared": {**V3, "shared_experts": 0, "mtp": 1, "tied": True, "mtp_input": "embedding_first"},
    "all-dense": {**V3, "dense_layers": 3, "mtp": 0, "seq_balance": 0.0, "q_rank": 0},
    "all-moe": {
        **V2,
        "dense_layers": 0,
        "groups": 1,
        "group_limit": 0,
        "device_balance": 0.0,
        "comm_balance": 0.0,
    },
}

test_exhaustively = pytest.mark.full(
    conformance(*(Case("model", use="deepseek", config=c, name=name) for name, c in OTHERS.items()))
)
