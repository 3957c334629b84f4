"""A GEMM backend stands in for a layer's own products under every wrapper and schedule."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.roles import Role, override_forward, tag
from nanotrain_core.models.ops import ops_of
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, gemms_of, use_gemm
from nanotrain_core.run.model_parts import split_linear_layers
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.parallel import traces
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_run

PLUGIN = str(Path(__file__).with_name("gemm_layers.py"))
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


@pytest.mark.full_cases("tp-biases", "routed", "ep", "tp", "etp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_plain_layers_on_one_process(layout):
    ranks, (alone,) = traces(case_of(layout, "exact")), traces(case_of(layout, "fp64").alone())
    for part in ("gradients", "weights"):
        found = whole([getattr(trace, part) for trace in ranks], atol=1e-10)
        assert_same(found, whole([getattr(alone, part)]), part, atol=1e-10)
    assert [r.loss for r in ranks[0].reports] == pytest.approx([r.loss for r in alone.reports], abs=1e-10)


def test_every_linear_layer_and_the_experts_that_ask_take_a_backend():
    taken = set(make_run(case_of("alone", "exact"), {}).described)
    names = {p.placement.name for p in make_run(case_of("alone", "fp64"), {}).placed}
    left = {name.rpartition(".")[0].rpartition(".")[2] for name in names - taken}
    assert left == {"embed", "head", "norm", "router", "attn_norm", "ffn_norm", "q_a_norm", "kv_a_norm",
                    "hidden_norm", "embed_norm"}  # fmt: skip
    assert "layers.1.moe.experts.down" in taken
    assert not any("experts" in name for name in make_run(case_of("routed", "exact"), {}).described)


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [64, 1, 30], [0, 8, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", [TorchGEMM(), DequantizingGEMM(TorchGEMM())], ids=["torch", "quantized"])
def test_plain_products_are_those_of_each_group_by_itself(backend, counts, dtype):
    """Experts without rows get zeros, a rank without rows nothing."""
    torch.manual_seed(0)
    rows, own = sum(counts), torch.tensor(counts)
    x, d_y, weight = torch.randn(rows, 16), torch.randn(rows, 24), torch.randn(3, 24, 16)
    x, d_y, weight = (each.to(dtype) for each in (x, d_y, weight))
    products = backend.grouped(own)
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


def test_a_layer_that_a_wrapper_computes_takes_no_backend():
    layer = override_forward(tag(nn.Linear(2, 2), Role.COLUMN), lambda module, x: x)
    assert gemm_parameters(layer) == ()
    assert gemm_parameters(nn.Linear(2, 2)) == ()
    assert gemms_of(layer) is None


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def test_a_layer_that_computes_more_than_its_product_takes_no_backend():
    layer, passes = tag(Halved(2, 2), Role.REPLICATED), Passes()
    assert gemm_parameters(layer) == ()
    with pytest.raises(PluginError, match=r"Halved.weight takes no GEMM backend: expected gemm_parameters"):
        use_gemm(layer, {"weight": TorchGEMM()}, passes)
    split_linear_layers(nn.Sequential(layer), TorchGEMM(), passes)
    x = torch.ones(1, 2)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias) / 2)


def test_a_backend_can_be_replaced():
    layer, passes = tag(nn.Linear(2, 2), Role.ROW), Passes()
    use_gemm(layer, {"weight": "one"}, passes)
    assert gemm_parameters(layer) == ("weight",)
    use_gemm(layer, {"weight": "other"}, passes)
    assert gemms_of(layer).backends == {"weight": "other"}


def test_what_is_made_of_weights_holds_while_they_stand_still():
    passes, other = Passes(), Passes()
    assert passes.weights_version is None
    with passes.weights_unchanged():
        first = passes.weights_version
        assert first is not None
        assert first == passes.weights_version
        assert other.weights_version is None
    with passes.weights_unchanged():
        assert passes.weights_version not in (None, first)
    assert passes.weights_version is None


def test_a_pass_that_fails_is_over():
    passes, later = Passes(), DeferredGradients()
    with pytest.raises(ZeroDivisionError), passes.weights_unchanged(), passes.backward(later):
        raise ZeroDivisionError
    assert passes.weights_version is None
    assert passes.deferred is None
    assert not passes.in_backward


def test_a_layer_defers_to_the_passes_that_it_was_given_and_to_no_others():
    passes, other, x = Passes(), Passes(), torch.randn(3, 4)
    layers = [tag(nn.Linear(4, 2, bias=False), Role.COLUMN) for _ in range(2)]
    for layer, own in zip(layers, (passes, other), strict=True):
        use_gemm(layer, {"weight": TorchGEMM()}, own)
    later = DeferredGradients()
    loss = sum(layer(x).sum() for layer in layers)
    with passes.backward(later):
        loss.backward()
    assert layers[0].weight.grad is None
    assert torch.equal(layers[1].weight.grad, x.sum(0).expand(2, 4))
    later.compute()
    assert torch.equal(layers[0].weight.grad, x.sum(0).expand(2, 4))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [False, True], ids=["first", "added"])
def test_a_weight_used_twice_has_both_wgrads_when_its_hook_runs(grad_dtype, before):
    """What waits for a gradient is told once, of the sum, in the run's dtype."""
    passes, later, told = Passes(), DeferredGradients(), []
    layer = tag(nn.Linear(4, 2, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    layer.weight.grad_dtype = grad_dtype
    layer.weight.grad = torch.full((2, 4), 0.5, dtype=grad_dtype) if before else None
    use_gemm(layer, {"weight": TorchGEMM()}, passes)
    inputs = [torch.arange(12.0).view(3, 4).bfloat16() + shift for shift in (0, 1)]
    loss = sum(layer(x).sum() for x in inputs)
    with passes.backward(later):
        loss.backward()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.clone()))
    later.compute()
    expected = 0.5 * before + sum(x.float().sum(0).bfloat16().to(grad_dtype) for x in inputs)
    assert len(told) == 1
    assert told[0].dtype == grad_dtype
    assert torch.equal(told[0], expected.to(grad_dtype).expand(2, 4))
    later.compute()
    assert len(told) == 1


def test_an_input_that_is_recomputed_is_kept_as_what_it_is_made_of():
    layer, passes = tag(nn.Linear(4, 2, bias=False), Role.ROW), Passes()
    use_gemm(layer, {"weight": TorchGEMM()}, passes)
    recomputed, half = gemms_of(layer).recomputed, torch.randn(3, 4)
    kept = []
    for x in (half * 2, half * 2):
        recomputed.offer(x, (half,), lambda half: half * 2)
        if kept:
            x.mul_(3)  # another one than was offered
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = layer(x)
        y.sum().backward()
        torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 4))
        layer.weight.grad = None
    assert [any(each is half for each in saved) for saved in (kept[:2], kept[2:])] == [True, False]


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_activation_checkpointing_leaves_weight_gradients_to_the_w_pass(kind):
    """What it saves of a weight is a detached copy, which was taken for one whose gradient cannot wait."""
    torch.manual_seed(0)
    passes, counts = Passes(), torch.tensor([2, 0, 3])
    if kind == "linear":
        layer, names = tag(nn.Linear(4, 4, bias=False), Role.COLUMN), ("weight",)
        forward = layer
    else:
        layer, names = nn.Module(), ("gate", "up", "down")
        for name in names:
            setattr(layer, name, nn.Parameter(torch.randn(3, 4, 4)))
        tag(layer, Role.EXPERTS, gemm_weights=names)

        def forward(x):
            return ops_of(layer).experts(x, counts, layer.gate, layer.up, layer.down)

    x = torch.randn(5, 4, requires_grad=True)
    forward(x).sum().backward()
    expected = [getattr(layer, name).grad.clone() for name in names]
    layer.zero_grad()
    use_gemm(layer, dict.fromkeys(names, TorchGEMM()), passes)
    y = checkpoint(forward, x, use_reentrant=False)
    with passes.backward(later := DeferredGradients()):
        y.sum().backward()
    assert all(getattr(layer, name).grad is None for name in names)
    later.compute()
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(getattr(layer, name).grad, gradient)
