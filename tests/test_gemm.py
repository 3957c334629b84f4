"""Products that a precision gives stand in for a layer's own under every wrapper and schedule."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag, take_over
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.gemm import gemm_parameters, products_of, steady, steady_weights, use_gemm
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.parallel import traces
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_run

PLUGIN = str(Path(__file__).with_name("given_products.py"))
GPT = {"bias": True, "norm": "layernorm", "activation": "gelu", "positions": "learned", "max_length": 16}
DEEPSEEK = {
    "use": "deepseek", "layers": 2, "dense_layers": 1, "width": 32, "vocab": 64, "heads": 4, "q_rank": 8,
    "kv_rank": 8, "nope_size": 8, "rope_size": 4, "value_size": 8, "ffn": 48, "experts": 4, "top_k": 2,
    "shared_experts": 1, "expert_ffn": 16, "groups": 2, "group_limit": 1, "mtp": 1, "init_std": 0.2,
}  # fmt: skip
DDP, TP, EP = {"use": "ddp"}, {"use": "tp"}, {"use": "ep_deepseek"}
LAYOUTS = {
    "alone": ({}, {"model": DEEPSEEK}),
    "tp-biases": ({"tp": 2}, {"model": GPT, "parallel": [TP, DDP]}),
    "tp": ({"tp": 2}, {"model": DEEPSEEK, "parallel": [{**TP, "sequence_parallel": False}, EP, DDP]}),
    "ep": ({"dp": 2, "ep": 2}, {"model": DEEPSEEK, "parallel": [EP, DDP]}),
    "etp": ({"dp": 2, "etp": 2}, {"model": DEEPSEEK, "parallel": [EP, DDP]}),
    "zb_h1": ({"pp": 2}, {"model": DEEPSEEK, "parallel": [DDP], "schedule": {"use": "zb_h1"}}),
    "routed": ({}, {"model": {"use": "routed"}}),
}


def case_of(layout, precision):
    topology, around = LAYOUTS[layout]
    return Case("precision", use=precision, topology=topology, overrides=around, plugins=[PLUGIN])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_products_have_the_gradients_of_a_layers_own_on_one_process(layout):
    ranks, (alone,) = traces(case_of(layout, "given")), traces(case_of(layout, "fp64").alone())
    for part in ("gradients", "weights"):
        found = whole([getattr(trace, part) for trace in ranks], atol=1e-10)
        assert_same(found, whole([getattr(alone, part)]), part, atol=1e-10)
    assert [r.loss for r in ranks[0].reports] == pytest.approx([r.loss for r in alone.reports], abs=1e-10)


def test_every_linear_layer_and_the_experts_that_ask_take_products():
    taken = set(make_run(case_of("alone", "given"), {}).described)
    names = {p.placement.name for p in make_run(case_of("alone", "fp64"), {}).placed}
    left = {name.rpartition(".")[0].rpartition(".")[2] for name in names - taken}
    assert left == {"embed", "head", "norm", "router", "attn_norm", "ffn_norm", "q_a_norm", "kv_a_norm",
                    "hidden_norm", "embed_norm"}  # fmt: skip
    assert "layers.1.moe.experts.down" in taken
    assert not any("experts" in name for name in make_run(case_of("routed", "given"), {}).described)


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [64, 1, 30], [0, 8, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_products_are_those_of_each_group_by_itself(counts, dtype):
    """Experts without rows get zeros, a rank without rows nothing."""
    torch.manual_seed(0)
    rows, own = sum(counts), torch.tensor(counts)
    x, d_y, weight = torch.randn(rows, 16), torch.randn(rows, 24), torch.randn(3, 24, 16)
    x, d_y, weight = (each.to(dtype) for each in (x, d_y, weight))
    products = DequantizingGEMM().grouped(own)
    (y,), kept = products.forward(x, weight)
    each = list(zip(x.split(counts), d_y.split(counts), weight, strict=True))
    tolerance = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    found = [y, products.dgrad(d_y, weight), products.wgrad(d_y, kept)]
    wanted = [
        torch.cat([a.double() @ w.double().T for a, _, w in each]),
        torch.cat([d.double() @ w.double() for _, d, w in each]),
        torch.stack([d.double().T @ a.double() for a, d, _ in each]),
    ]
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_layer_that_a_wrapper_computes_keeps_its_products():
    layer = take_over(tag(nn.Linear(2, 2), Role.COLUMN), lambda module, x: x)
    assert gemm_parameters(layer) == ()
    assert multiplied(nn.Linear(2, 2)) == ()
    assert products_of(layer) == {}


def test_products_can_be_given_anew():
    layer = tag(nn.Linear(2, 2), Role.ROW)
    use_gemm(layer, {"weight": "one"})
    assert gemm_parameters(layer) == ("weight",)
    use_gemm(layer, {"weight": "other"})
    assert products_of(layer) == {"weight": "other"}


def test_what_is_made_of_weights_holds_while_they_are_steady():
    assert steady() is None
    with steady_weights():
        first = steady()
        assert first == steady()
    with steady_weights():
        assert steady() not in (None, first)
    assert steady() is None
