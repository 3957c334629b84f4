"""What a feed-forward layer keeps for its backward pass, and what that does to its gradients."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from nanotrain_core.models.swiglu import swiglu
from nanotrain_fp8_deepseek_v3.formats import quantise
from nanotrain_fp8_deepseek_v3.products import EmulatedFP8, Recipe

from nanotrain_core.builtin.configs import TransformerConfig
from nanotrain_core.layout.roles import tagged
from nanotrain_core.models.transformer import SwiGLU
from nanotrain_core.pipeline import weight_gradients
from nanotrain_core.pipeline.weight_gradients import Postponed
from nanotrain_core.precision.gemm import use_gemm
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run

M, D, INNER = 64, 128, 384


def layer_of(recipe, *, given=EmulatedFP8):
    torch.manual_seed(0)
    layer = SwiGLU(TransformerConfig(layers=1, width=D, heads=2, ffn=INNER, vocab=8)).bfloat16()
    shared = given(recipe)
    for _, module, _ in tagged(layer):
        use_gemm(module, {"weight": shared})
    return layer


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bytes_kept(layer, x):
    """Return the bytes that a forward pass leaves for the backward pass, weights and the input aside."""
    own = {p.data_ptr() for p in layer.parameters()} | {x.data_ptr()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return sum(found.values())


def test_five_of_seven_bytes_of_each_inner_number_are_saved():
    """Gate and up are kept in eight bits, not gate, silu(gate) and up in sixteen, their product in eight."""
    x = rows(M, D).requires_grad_()
    scales, of_input = 4 * M * INNER // 128, M * D + 4 * M * D // 128
    wide = bytes_kept(layer_of(Recipe()), x)
    narrow = bytes_kept(layer_of(Recipe(narrow=True)), x)
    assert wide - of_input == 7 * M * INNER + scales
    assert narrow - of_input == 2 * M * INNER + 2 * scales


def gradients(layer, x, d_y):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(d_y)
    return y, {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def test_gradients_are_those_of_the_rounded_inputs():
    """Of the very gate and up that codes and scales mean; the output itself does not change."""
    layer, x, d_y = layer_of(Recipe(narrow=True)), rows(M, D), rows(M, D, seed=1)
    y, found = gradients(layer, x, d_y)
    assert torch.equal(y, gradients(layer_of(Recipe()), x, d_y)[0])

    products = EmulatedFP8(Recipe())
    (g, u), x_kept = products.forward(x, layer.gate.weight, layer.up.weight)
    g, u = (quantise(each, (1, 128)).values().bfloat16() for each in (g, u))
    d_h = products.dgrad(d_y, layer.down.weight)
    d_u, d_g = d_h * F.silu(g), torch.ops.aten.silu_backward(d_h * u, g)
    assert torch.equal(found["up.weight"], products.wgrad(d_u, x_kept).bfloat16())
    assert torch.equal(found["gate.weight"], products.wgrad(d_g, x_kept).bfloat16())
    kept = products.keep(F.silu(g) * u)
    assert torch.equal(found["down.weight"], products.wgrad(d_y, kept).bfloat16())


def test_gradients_stay_near_those_of_inputs_kept_whole():
    """Rounding moves a number by 2.6% in the mean, and what gate and up make by twice as much."""
    x, d_y = rows(M, D), rows(M, D, seed=1)
    _, narrow = gradients(layer_of(Recipe(narrow=True)), x, d_y)
    _, whole = gradients(layer_of(Recipe()), x, d_y)
    for name, wanted in whole.items():
        error = ((narrow[name] - wanted).float().norm() / wanted.float().norm()).item()
        assert 0 < error < 0.08, f"{name}: {error:.3f}"


def test_the_output_is_made_again_when_the_gradient_is_not_before():
    x, d_y, made = rows(M, D), rows(M, D, seed=1), []

    class Counting(EmulatedFP8):
        def keep(self, x_MK):
            made.append(x_MK)
            return super().keep(x_MK)

    _, at_once = gradients(layer_of(Recipe(narrow=True)), x, d_y)
    layer, later = layer_of(Recipe(narrow=True), given=Counting), Postponed()
    y = layer(x.clone().requires_grad_())
    with weight_gradients.postpone(later):
        y.backward(d_y)
    assert made == []
    later.compute()
    assert len(made) == 1
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, at_once[name])


@pytest.mark.parametrize(("config", "narrow"), [({}, True), ({"swiglu": False}, False)])
def test_the_recipe_says_whether(config, narrow):
    (part,) = make_run(Case("precision", use="fp8_deepseek_v3", config=config), {}).stages.values()
    recipe = part.layers["0"].ffn.down.nanotrain_products["weight"].recipe
    assert recipe == attrs.evolve(Recipe(), narrow=narrow)


def test_what_was_written_to_since_is_kept_as_it_is():
    down = layer_of(Recipe(narrow=True)).down
    gate, up = (rows(M, INNER, seed=seed).requires_grad_() for seed in (1, 2))
    found = []
    for times in (lambda h: h * 3, lambda h: h.mul_(3)):
        down(times(swiglu(gate, up, down))).sum().backward()
        found.append(down.weight.grad)
        down.weight.grad = None
    torch.testing.assert_close(*found, rtol=0, atol=0)
