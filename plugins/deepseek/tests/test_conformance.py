"""Small models of V3's and of V2's shape pass the harness."""

import pytest
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.testing import Case, conformance
from nanotrain_core.testing.variants import Variant, filled, variants_of

test_conformance = conformance(Case("model", use="deepseek", config=V3, name="v3"))


def test_the_harness_has_an_example_of_it_where_keys_are_missing():
    assert filled(Case("model", use="deepseek")).settings().mtp == V3["mtp"]
    assert filled(Case("model", use="deepseek", config={"mtp": 0})).config == {**V3, "mtp": 0}
    assert filled(Case("model", use="deepseek", config=V2)).config == V2
    found = [each for each in variants_of(Case("model", use="deepseek")) if isinstance(each, Variant)]
    configs = {each.name: each.case.config for each in found}
    assert configs[""] == V3
    assert configs["tied=true"] == {**V3, "tied": True}


OTHERS = {
    "v2": V2,
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
