"""ep_deepseek passes the harness around a small mixture of experts, for every fold of ep and etp.

And it is right where users of other frameworks found expert parallelism wrong, thread by thread.
"""

import pytest
import torch

from nanotrain_core.testing import Case, conformance, run_ranks
from nanotrain_core.testing.compare import whole
from nanotrain_core.testing.probe import train


def case(name="", model=None, **topology):
    """Return ep_deepseek beside a gradient sync on that topology, with the harness's mixture of experts."""
    overrides = {
        "model": {"use": "routed", **(model or {})},
        "parallel": [{"use": "summed"}],
        "batch": {"sequences": max(8, 2 * topology["dp"])},
    }
    return Case("parallel", use="ep_deepseek", topology=topology, overrides=overrides, name=name)


test_conformance = conformance(
    case(dp=4, ep=2, etp=2),
    # The first tier has them of ddp and zero12.
    slow=pytest.mark.full,
)

test_exhaustively = pytest.mark.full(
    conformance(
        case(dp=2, ep=2),
        case(dp=2, etp=2),
        case(dp=4, ep=2),
        case(dp=4, ep=4),
        case(dp=4, etp=4),
        case(dp=8, ep=2, etp=2),
        case(dp=8, ep=8),
        case("one_expert_gets_all", {"favored": 1, "chosen": 1}, dp=4, ep=4),
        case("one_expert_gets_all_in_slices", {"favored": 1, "chosen": 1}, dp=4, ep=2, etp=2),
    )
)

ONE_STEP = {"run": {"steps": 1}}
FOLDS = (
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    pytest.param({"dp": 4, "ep": 4}, marks=pytest.mark.full),
    pytest.param({"dp": 4, "ep": 2}, marks=pytest.mark.full),
    pytest.param({"dp": 4, "etp": 2}, marks=pytest.mark.full),
)


def gradients(case):
    """Return the whole gradients of the first step, and the norms that the ranks report."""
    ranks = run_ranks(train, case.world_size, case, ONE_STEP)
    return whole([rank.gradients for rank in ranks]), [rank.reports[0].grad_norm for rank in ranks]


@pytest.fixture(scope="module")
def alone():
    return gradients(case(dp=2).alone())[0]


@pytest.fixture(scope="module", params=FOLDS, ids=str)
def folded(request):
    return gradients(case(**request.param))


def test_deepspeed_6545_and_5618_expert_gradients_do_not_grow_with_ep(alone, folded):
    spread, _ = folded
    for name in (n for n in alone if "experts" in n):
        ratio = torch.linalg.vector_norm(spread[name]) / torch.linalg.vector_norm(alone[name])
        assert ratio.item() == pytest.approx(1.0, abs=1e-12), name


def test_megatron_5916_the_gradient_norm_counts_every_expert_once(alone, folded):
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in alone.values()])).item()
    experts = torch.linalg.vector_norm(torch.cat([g.flatten() for n, g in alone.items() if "experts" in n]))
    assert experts > 0.1 * norm  # enough to be seen
    _, norms = folded
    assert norms == pytest.approx([norm] * len(norms), abs=1e-12)


def test_megatron_1622_and_1628_sliced_experts_need_no_ep(alone):
    for fold in ({"dp": 2, "etp": 2}, {"dp": 4, "etp": 4}):
        for name, gradient in gradients(case(**fold))[0].items():
            torch.testing.assert_close(gradient, alone[name], rtol=0, atol=1e-10, msg=f"{name} {fold}")


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_deepspeed_5066_a_router_that_sends_all_tokens_to_one_expert_stops_nobody(fold):
    collapsed = case("", {"favored": 1, "chosen": 1}, **fold)
    expected, _ = gradients(collapsed.alone())
    for name, gradient in gradients(collapsed)[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10, msg=name)
    assert expected["layers.0.experts.up"][0].abs().max() > 0
    assert not expected["layers.0.experts.up"][1:].any()
