"""What a feed-forward layer keeps for its backward pass, and what that does to its gradients."""

import weakref
from dataclasses import replace
from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from nanotrain_fp8_deepseek_v3.formats import quantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.layout.roles import Role, tag, tagged
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import QuantizedInput, gemms_of, use_gemm
from nanotrain_core.precision.quantized_swiglu import QuantizedSwiGLU, quantize_swiglu
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run

M, D, INNER = 64, 128, 384
QUANTIZED = FP8Recipe(quantize_swiglu=True)


class AtOnce(EmulatedFP8):
    """A stand-in for one kernel: computes SwiGLU and rounds. What it returns whole must not be read."""

    calls = None

    def swiglu(self, gate, up, *, whole=False):
        self.calls.append("swiglu")
        h = F.silu(gate) * up
        values, kept = self.round_input(h)
        nan = torch.full_like(h, float("nan")) if whole else None
        return QuantizedInput((values, *kept), h.shape, h.dtype, nan), self.quantize(gate), self.quantize(up)

    def recompute_swiglu(self, gate, up, dtype, *, whole=False):
        self.calls.append("again")
        gate, up = (self.dequantize(each, dtype) for each in (gate, up))
        h = F.silu(gate) * up
        values, kept = self.round_input(h)
        return QuantizedInput((values, *kept), h.shape, dtype, h if whole else None)

    def swiglu_backward(self, gate, up, d_h, *, whole=False):
        self.calls.append("backward")
        gate, up = (self.dequantize(each, d_h.dtype) for each in (gate, up))
        silu = F.silu(gate)
        values, kept = self.round_input(silu * up)
        h = QuantizedInput((values, *kept), d_h.shape, d_h.dtype, silu * up if whole else None)
        return h, torch.ops.aten.silu_backward(d_h * up, gate), d_h * silu

    def of_input(self, x):
        if not isinstance(x, QuantizedInput):
            return super().of_input(x)
        values, *kept = x.forms
        return values, tuple(kept)


def at_once():
    """Return the class of a stand-in, and the list of its calls."""
    calls = []
    return type("AtOnce", (AtOnce,), {"calls": calls}), calls


def layer_of(recipe, *, backend=EmulatedFP8, passes=None):
    torch.manual_seed(0)
    layer, shared, passes = SwiGLU(D, INNER).bfloat16(), backend(recipe), passes or Passes()
    for _, module, _ in tagged(layer):
        use_gemm(module, {"weight": shared}, passes)
    quantize_swiglu(layer)
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
    wide = bytes_kept(layer_of(FP8Recipe()), x)
    narrow = bytes_kept(layer_of(QUANTIZED), x)
    assert wide - of_input == 7 * M * INNER + scales
    assert narrow - of_input == 2 * M * INNER + 2 * scales


def gradients(layer, x, d_y):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(d_y)
    return y, {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def test_gradients_are_those_of_the_rounded_inputs():
    """Of the very gate and up that codes and scales mean; the output itself does not change."""
    layer, x, d_y = layer_of(QUANTIZED), rows(M, D), rows(M, D, seed=1)
    y, found = gradients(layer, x, d_y)
    assert torch.equal(y, gradients(layer_of(FP8Recipe()), x, d_y)[0])

    products = EmulatedFP8(FP8Recipe())
    (g, u), x_kept = products.forward(x, layer.gate.weight, layer.up.weight)
    g, u = (quantize(each, (1, 128)).values().bfloat16() for each in (g, u))
    d_h = products.dgrad(d_y, layer.down.weight)
    d_u, d_g = d_h * F.silu(g), torch.ops.aten.silu_backward(d_h * u, g)
    assert torch.equal(found["up.weight"], products.wgrad(d_u, x_kept).bfloat16())
    assert torch.equal(found["gate.weight"], products.wgrad(d_g, x_kept).bfloat16())
    kept = products.save_for_wgrad(F.silu(g) * u)
    assert torch.equal(found["down.weight"], products.wgrad(d_y, kept).bfloat16())


def test_gradients_stay_near_those_of_inputs_kept_whole():
    """Rounding moves a number by 2.6% in the mean, and what gate and up make by twice as much."""
    x, d_y = rows(M, D), rows(M, D, seed=1)
    _, narrow = gradients(layer_of(QUANTIZED), x, d_y)
    _, whole = gradients(layer_of(FP8Recipe()), x, d_y)
    for name, wanted in whole.items():
        error = ((narrow[name] - wanted).float().norm() / wanted.float().norm()).item()
        assert 0 < error < 0.08, f"{name}: {error:.3f}"


def test_the_output_is_recomputed_once_for_a_w_pass_and_only_its_codes_wait():
    x, d_y, made, passes = rows(M, D), rows(M, D, seed=1), [], Passes()

    class Counting(EmulatedFP8):
        def save_for_wgrad(self, x_MK):
            made.append(x_MK)
            return super().save_for_wgrad(x_MK)

    _, at_once = gradients(layer_of(QUANTIZED), x, d_y)
    layer, later = layer_of(QUANTIZED, backend=Counting, passes=passes), DeferredGradients()
    y = layer(x.clone().requires_grad_())
    with passes.backward(later):
        y.backward(d_y)
    (h,) = made
    alive = weakref.ref(h)
    made.clear()
    del h, y
    assert alive() is None
    later.compute()
    assert made == []
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, at_once[name])


@pytest.mark.parametrize(("config", "quantized"), [({}, True), ({"swiglu": False}, False)])
def test_the_recipe_says_whether(config, quantized):
    (part,) = make_run(Case("precision", use="fp8_deepseek_v3", config=config), {}).stages.values()
    recipe = gemms_of(part.layers["0"].ffn.down).backends["weight"].recipe
    assert recipe == attrs.evolve(FP8Recipe(), quantize_swiglu=quantized)


def test_what_was_written_to_since_is_kept_as_it_is():
    layer = layer_of(QUANTIZED)
    down, swiglu = layer.down, layer.ops.swiglu
    gate, up = (rows(M, INNER, seed=seed).requires_grad_() for seed in (1, 2))
    found = []
    for times in (lambda h: h * 3, lambda h: h.mul_(3)):
        down(times(swiglu(gate, up))).sum().backward()
        found.append(down.weight.grad)
        down.weight.grad = None
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_backend_put_in_between_leaves_every_number_as_it_is():
    """As a monitor does, once the layer keeps its inputs in eight bits."""
    x, d_y = rows(M, D), rows(M, D, seed=1)
    y, expected = gradients(layer_of(QUANTIZED), x, d_y)
    layer, watch = layer_of(QUANTIZED), Watch()
    for name, module, _ in tagged(layer):
        backends = gemms_of(module).backends
        backends["weight"] = Watched(backends["weight"], watch, name, module)
    watch.begin(on=True)
    watched, found = gradients(layer, x, d_y)
    assert torch.equal(watched, y)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert watch.recomputed == {"down"}


def test_an_offer_that_no_layer_takes_goes_with_its_tensor():
    layer = layer_of(QUANTIZED)
    gate, up = (rows(M, INNER, seed=seed).requires_grad_() for seed in (1, 2))
    h = layer.ops.swiglu(gate, up)
    alive = weakref.ref(h)
    del h
    assert alive() is None


def test_a_frozen_layer_after_swiglu_leaves_the_other_gradients_as_they_are():
    """Nothing asks for its input, which else is dequantized first, and then found by gate and up."""
    x, d_y = rows(M, D), rows(M, D, seed=1)
    _, expected = gradients(layer_of(QUANTIZED), x, d_y)
    layer = layer_of(QUANTIZED)
    layer.down.requires_grad_(False)
    _, found = gradients(layer, x, d_y)
    assert found.pop("down.weight") is None
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_what_computes_swiglu_elsewhere_computes_it_here():
    """Kernels may have put their own in the table before: in training and out of it, the output is theirs."""
    layer, x = layer_of(FP8Recipe()), rows(M, D)
    layer.ops = replace(layer.ops, swiglu=lambda gate, up: F.silu(gate) * up + 1)
    for module in (layer.gate, layer.up, layer.down):
        use_gemm(module, {"weight": EmulatedFP8(QUANTIZED)}, Passes())
    with torch.no_grad():
        expected = layer(x)
    quantize_swiglu(layer)
    assert torch.equal(layer(x), expected)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


# --- one kernel for SwiGLU and its rounding -------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_layer_reads_what_one_kernel_computed_and_rounded(recomputed):
    """Twice where the layer is recomputed. The whole product, which the stand-in spoils, is not read."""
    x, d_y, (backend, calls) = rows(M, D), rows(M, D, seed=1), at_once()
    y, expected = gradients(layer_of(QUANTIZED), x, d_y)
    layer = layer_of(QUANTIZED, backend=backend)
    run = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
    run.named_parameters = layer.named_parameters
    found_y, found = gradients(run, x, d_y)
    assert calls == ["swiglu"] * (2 if recomputed else 1) + ["again"]
    assert torch.equal(found_y, y)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_w_pass_holds_what_one_kernel_rounded_again():
    x, d_y, (backend, calls), passes = rows(M, D), rows(M, D, seed=1), at_once(), Passes()
    _, expected = gradients(layer_of(QUANTIZED), x, d_y)
    layer, later = layer_of(QUANTIZED, backend=backend, passes=passes), DeferredGradients()
    y = layer(x.clone().requires_grad_())
    with passes.backward(later):
        y.backward(d_y)
    assert calls == ["swiglu", "again"]
    later.compute()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name])


def test_a_tensor_made_of_the_product_is_rounded_as_it_is():
    """A hook may have replaced it, or written to it: nothing that one kernel rounded is multiplied then."""
    (backend, _), found = at_once(), []
    for times in (torch.ones_like, lambda h: h.zero_().add_(1)):
        layer = layer_of(QUANTIZED, backend=backend)
        gate, up = (rows(M, INNER, seed=seed).requires_grad_() for seed in (1, 2))
        found.append(layer.down(times(layer.ops.swiglu(gate, up))))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], layer_of(QUANTIZED).down(torch.ones(M, INNER).bfloat16()))


@pytest.mark.parametrize("why", ["no gradient", "another SwiGLU"])
def test_one_kernel_is_not_used_where_nothing_is_saved_or_swiglu_is_anothers(why):
    """``kernels`` may have replaced the function in the table: its values are those of the forward pass."""
    (backend, calls), x = at_once(), rows(M, D)
    layer = layer_of(QUANTIZED, backend=backend)
    if why == "another SwiGLU":
        layer.ops = replace(layer.ops, swiglu=QuantizedSwiGLU(lambda a, b: F.silu(a) * b + 1, layer.down))
        layer(x.requires_grad_())
    else:
        with torch.no_grad():
            layer(x)
    assert calls == []


def test_a_backend_put_in_between_sees_the_whole_product_that_one_kernel_rounded():
    x, d_y, (backend, calls), found = rows(M, D), rows(M, D, seed=1), at_once(), []
    _, expected = gradients(layer_of(QUANTIZED), x, d_y)

    class Sound(backend):
        def swiglu(self, gate, up, *, whole=False):
            h, *saved = super().swiglu(gate, up, whole=whole)
            return replace(h, whole=F.silu(gate) * up if whole else None), *saved

    for kind in (EmulatedFP8, Sound):
        layer, watch = layer_of(QUANTIZED, backend=kind), Watch()
        for name, module, _ in tagged(layer):
            backends = gemms_of(module).backends
            backends["weight"] = Watched(backends["weight"], watch, name, module)
        watch.begin(on=True)
        _, watched = gradients(layer, x, d_y)
        assert all(torch.equal(watched[name], gradient) for name, gradient in expected.items())
        tallies = watch.tallies.items()
        found.append({key: (t.elements, t.counts.tolist(), t.amax.item()) for key, t in tallies})
    assert calls == ["swiglu", "again"]
    assert found[0] == found[1]


@pytest.mark.parametrize("counts", [[40, 0, 23], [0, 0, 0]], ids=str)
def test_experts_read_what_one_kernel_computed_and_rounded_each_way(counts):
    x, d_y, results, (backend, calls) = rows(sum(counts), D), rows(sum(counts), D, seed=1), [], at_once()
    for kind in (EmulatedFP8, backend):
        experts = tag(nn.Module(), Role.EXPERTS, gemm_weights=("gate", "up", "down"))
        for seed, (name, shape) in enumerate({"gate": (256, D), "up": (256, D), "down": (D, 256)}.items()):
            setattr(experts, name, nn.Parameter(rows(len(counts), *shape, seed=seed)))
        use_gemm(experts, dict.fromkeys(("gate", "up", "down"), kind(QUANTIZED)), Passes())
        own = x.clone().requires_grad_()
        y = experts.ops.experts(own, torch.tensor(counts), experts.gate, experts.up, experts.down)
        y.backward(d_y)
        results.append([y, own.grad, *(weight.grad for weight in experts.parameters())])
    assert calls == ["swiglu", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
