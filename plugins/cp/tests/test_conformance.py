"""cp keeps the promises of a parallel wrapper, by all ways to communicate, alone and beside others."""

import pytest

from nanotrain_core.testing import Case, conformance

LLAMA = {"width": 32, "heads": 8, "kv_heads": 4, "ffn": 88}
ONE_KEY_HEAD = {**LLAMA, "kv_heads": 1}
GATHER, RING = {"communication": "all_gather"}, {"communication": "ring"}
UNEVEN = {"length": 15}


def case(name, topology, config=None, **overrides):
    """Case of one layout, with gradients summed by the core."""
    return Case("parallel", use="cp", config=config or {}, topology=topology, overrides=overrides, name=name)


test_conformance = conformance(
    case("one-key-head-cp2-gather", {"cp": 2}, GATHER, model=ONE_KEY_HEAD, batch=UNEVEN),
    case("llama-cp3-ring", {"cp": 3}, RING, model=LLAMA, batch=UNEVEN),
    # The first tier has both beside tp, ep, pipelines and zero12.
    slow=pytest.mark.full,
)

test_exhaustively = pytest.mark.full(
    conformance(
        case("cp2", {"cp": 2}),
        case("llama-cp4-uneven", {"cp": 4}, model=LLAMA, batch=UNEVEN),
        case("llama-dp2-cp2-gather", {"dp": 2, "cp": 2}, GATHER, model=LLAMA),
        case("llama-dp2-cp2-ring", {"dp": 2, "cp": 2}, RING, model=LLAMA),
        case("one-key-head-cp4-ring", {"cp": 4}, RING, model=ONE_KEY_HEAD, batch={"length": 5}),
        case("one-key-head-cp4-gather", {"cp": 4}, GATHER, model=ONE_KEY_HEAD, batch={"length": 5}),
    )
)
