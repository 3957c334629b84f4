"""A router's choice of experts against plain PyTorch's; on a CPU, and in Triton's interpreter.

``test_triton.py`` runs this file once more with ``TRITON_INTERPRET=1``.
"""

import os

import pytest
import torch
from nanotrain_cuda import CUDAKernelsConfig
from nanotrain_cuda.kernels import CUDAKernels
from nanotrain_cuda.top_k import choose, choose_experts

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.moe.routing import CountingRouter
from nanotrain_core.moe.top_k import choose_experts as plain
from nanotrain_core.pipeline.passes import Passes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Experts, experts chosen, groups, groups chosen: of V3, V2 and V2-Lite, none of a power of two, all, one.
SIZES = pytest.mark.parametrize(
    "sizes",
    [(256, 8, 8, 4), (160, 6, 8, 3), (64, 6, 1, 1), (30, 5, 6, 2), (12, 12, 3, 3), (1, 1, 1, 1)],
    ids=str,
)
BIASED = pytest.mark.parametrize("biased", [True, False], ids=["sigmoid with a bias", "softmax"])


def draw(E, *, biased, shape=(1, 3)):
    """Return scores without equal ones, and a bias: of each token another order of multiples of 2^-12."""
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(*shape, E, generator=generator).argsort(-1)
    scores = (1 + orders) * 2.0**-12
    return scores, torch.randperm(E, generator=generator) * 2.0**-24 if biased else None


@SIZES
@BIASED
def test_experts_are_those_of_plain_pytorch_best_first(sizes, biased):
    E, *rest = sizes
    scores, bias = draw(E, biased=biased)
    found = choose_experts(scores, bias, *rest)
    assert found.dtype == torch.int64
    assert torch.equal(found, plain(scores, bias, *rest))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@SIZES
@BIASED
def test_on_a_gpu_experts_are_those_of_plain_pytorch_on_a_cpu(sizes, biased):
    E, *rest = sizes
    scores, bias = draw(E, biased=biased, shape=(1000,))
    found = choose_experts(scores.cuda(), None if bias is None else bias.cuda(), *rest)
    assert torch.equal(found.cpu(), plain(scores, bias, *rest))


@BIASED
def test_negative_numbers_and_extremes_have_their_order(biased):
    scores = torch.tensor([[-0.5, float("-inf"), -3e38, 2e-45, float("inf"), -2.0, 1.0, -1e-45]])
    bias = torch.zeros(8) if biased else None
    for top_k in range(1, 9):
        assert torch.equal(choose_experts(scores, bias, top_k), plain(scores, bias, top_k))


@pytest.mark.parametrize("sizes", [(64, 6, 8, 3), (30, 5, 6, 2), (12, 12, 3, 3)], ids=str)
@BIASED
@pytest.mark.parametrize("what", ["equal", "NaN", "some NaN", "infinite", "minus infinity"])
def test_whatever_the_scores_each_expert_is_chosen_once_and_exists(sizes, biased, what):
    E, top_k, groups, chosen_groups = sizes
    scores, bias = draw(E, biased=biased)
    if what == "some NaN":
        scores[..., ::3] = float("nan")
    else:
        scores.fill_({"equal": 0.5, "NaN": float("nan"), "infinite": float("inf")}.get(what, float("-inf")))
    bias = None if bias is None else torch.zeros_like(bias)
    found = choose_experts(scores, bias, top_k, groups, chosen_groups)
    assert ((found >= 0) & (found < E)).all()
    assert (found.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.skipif(not INTERPRETED, reason="torch chooses any of equal ones")
def test_of_equal_scores_the_first_experts_are_chosen():
    assert choose_experts(torch.zeros(2, 16), torch.zeros(16), 3, 4, 2).tolist() == [[0, 1, 2]] * 2


def test_scores_may_lie_in_any_way_and_there_may_be_no_tokens():
    scores, bias = draw(64, biased=True, shape=(10,))
    turned = scores.T.contiguous().T
    assert torch.equal(choose_experts(turned, bias, 6, 8, 3), plain(scores, bias, 6, 8, 3))
    assert choose_experts(scores[:0], bias, 6, 8, 3).shape == (0, 6)


def test_torch_finds_no_fault_with_the_operator():
    scores, bias = draw(16, biased=True, shape=(5,))
    for given in ((bias, 3, 4, 2), (None, 2, 1, 1)):
        torch.library.opcheck(choose, (scores, *given))


def test_a_choice_is_a_node_of_a_graph_and_has_no_gradient():
    scores, bias = draw(16, biased=True)
    scores.requires_grad_()

    def weigh(scores):
        return scores.gather(-1, choose_experts(scores, bias, 3, 4, 2)).sum()

    torch._dynamo.reset()
    graph = torch.compile(weigh, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(way(scores), scores)[0] for way in (graph, weigh))
    assert torch.equal(found, expected)
    assert (found.sum(-1) == 3).all()


def test_a_run_s_routers_choose_with_it():
    router = tag(CountingRouter(4), Role.ROUTER)
    assert router.choose is plain
    CUDAKernels(CUDAKernelsConfig()).apply(torch.nn.ModuleList([router]), Passes())
    assert router.choose is choose_experts
