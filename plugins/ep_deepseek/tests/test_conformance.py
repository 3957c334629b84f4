"""ep_deepseek passes the harness around a small mixture of experts, for every fold of ep and etp."""

from pathlib import Path

import pytest

from nanotrain_core.testing import Case, conformance

MODEL = str(Path(__file__).with_name("tiny_moe.py"))


def case(name="", model=None, **topology):
    """Return ep_deepseek beside ddp on that topology, with the tiny mixture of experts."""
    overrides = {"model": {"use": "tiny_moe", **(model or {})}, "parallel": [{"use": "ddp"}]}
    return Case(
        "parallel", use="ep_deepseek", topology=topology, overrides=overrides, plugins=(MODEL,), name=name
    )


test_conformance = conformance(
    case(dp=2, ep=2),
    case(dp=2, etp=2),
    case(dp=4, ep=2),
    case(dp=4, ep=2, etp=2),
)

test_exhaustively = pytest.mark.full(
    conformance(
        case(dp=4, ep=4),
        case(dp=4, etp=4),
        case(dp=8, ep=2, etp=2),
        case(dp=8, ep=8),
        case("one_expert_gets_all", {"favoured": 1, "chosen": 1}, dp=4, ep=4),
        case("one_expert_gets_all_in_slices", {"favoured": 1, "chosen": 1}, dp=4, ep=2, etp=2),
    )
)
