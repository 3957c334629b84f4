"""The three products, and their backends, against float64."""

import pytest
import torch
import torch.nn.functional as F
from fp8_operands import RECIPES, SHAPES, TILED, WHOLE, checked_product, normal, outliers, products_of
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, quantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Float32GEMM
from nanotrain_fp8_deepseek_v3.operand_cache import Last, MadeOnce, OperandCache
from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import use_gemm


def half_units(x, tile, form=E4M3, *, power_of_two=False):
    """Return the most that rounding may move each element: half a unit in its last place."""
    tiled = quantize(x, tile, form, power_of_two=power_of_two)
    exponents = tiled.quotients.abs().clamp_min(form.smallest).frexp().exponent - 1
    tiled.quotients.copy_(2.0**exponents * 0.5 * 2.0**-form.mantissa)
    moved = (tiled.quotients * tiled.of_pieces).flatten(-4, -3).flatten(-2, -1)
    return moved[: x.shape[0], : x.shape[1]].double() * (1 + 2.0**-20)


def furthest(a, error_a, b, error_b):
    """Bound a product of sums: what rounding of the operands, float32 sums and a bfloat16 result may add."""
    a, b = a.double().abs(), b.double().abs()
    rounding = a @ error_b + error_a @ b + error_a @ error_b
    return rounding + (a + error_a) @ (b + error_b) * (2.0**-8 + a.shape[1] * 2.0**-24)


@RECIPES
@SHAPES
@pytest.mark.parametrize("data", [normal, outliers])
def test_each_product_is_as_near_as_the_formats_theory_allows(data, shape, recipe):
    M, K, N = shape
    x, w, d_y = data(M, K), normal(N, K, seed=1), data(M, N, seed=2)
    products = EmulatedFP8(recipe)
    (y,), kept = products.forward(x, w)
    tile = (1, 128) if recipe.tile else (0, 0)
    transposed = (128, 1) if recipe.tile else (0, 0)
    of_x = half_units(x, tile, power_of_two=recipe.input_power_of_two)
    of_w = half_units(w, (recipe.tile, recipe.tile))
    assert ((y.double() - x.double() @ w.double().T).abs() <= furthest(x, of_x, w.T, of_w.T)).all()

    form, powers = recipe.gradients, recipe.gradient_power_of_two
    d_x, of_d_y = products.dgrad(d_y, w), half_units(d_y, tile, form, power_of_two=powers)
    assert ((d_x.double() - d_y.double() @ w.double()).abs() <= furthest(d_y, of_d_y, w, of_w)).all()

    d_w, of_d_y = products.wgrad(d_y, kept), half_units(d_y, transposed, form, power_of_two=powers)
    once = quantize(x, tile, power_of_two=recipe.input_power_of_two).values()
    twice = half_units(once, transposed, power_of_two=recipe.input_power_of_two) if recipe.tile else 0.0
    bound = furthest(d_y.T, of_d_y.T, x, of_x + twice)
    assert ((d_w.double() - d_y.double().T @ x.double()).abs() <= bound).all()


def test_error_of_a_product_of_normal_numbers():
    """Each operand's is uniform within half a unit, 2.6% in the mean: 3.7% of the product together."""
    x, w = normal(512, 512), normal(512, 512, seed=1)
    (y,), _ = EmulatedFP8(TILED).forward(x, w)
    exact = x.double() @ w.double().T
    assert 0.03 < (y.double() - exact).norm() / exact.norm() < 0.04


def test_an_outlier_costs_its_own_tile_only():
    """Small numbers beside it are lost; with one scale for the tensor, all others would be too."""
    x, w = normal(64, 384) * 0.01, normal(64, 384, seed=1)
    x[:, 5] = 1e4
    x[:, 5] *= w.new_zeros(())  # the outlier is 0 in the sum: only its scale remains
    x[0, 5] = 1e4
    w[:, 5] = 0
    exact = x.double() @ w.double().T

    def error(recipe):
        (y,), _ = EmulatedFP8(recipe).forward(x, w)
        return [
            ((y - exact).norm(dim=1) / exact.norm(dim=1))[row].max().item() for row in (0, slice(1, None))
        ]

    own, others = error(TILED)
    assert own < 0.7  # a third of its row is gone
    assert others < 0.06
    assert error(WHOLE)[1] > 0.9


@RECIPES
def test_stacked_weights_are_multiplied_each_by_its_rows(recipe):
    counts = [40, 0, 130, 1, 29]
    x, weights, d_y = normal(200, 130), normal(5, 48, 130, seed=1), normal(200, 48, seed=2)
    one, grouped = EmulatedFP8(recipe), EmulatedFP8(recipe).grouped(torch.tensor(counts))
    (y,), kept = grouped.forward(x, weights)
    d_x, d_w = grouped.dgrad(d_y, weights), grouped.wgrad(d_y, kept)
    first = 0
    for e, count in enumerate(counts):
        rows = slice(first, first + count)
        (own,), kept = one.forward(x[rows], weights[e])
        assert torch.equal(y[rows], own)
        assert torch.equal(d_x[rows], one.dgrad(d_y[rows], weights[e]))
        assert torch.equal(d_w[e], one.wgrad(d_y[rows], kept))
        first += count


def test_experts_that_read_one_tensor_cut_elsewhere_have_other_scales():
    """What was made of the last input is of these experts' rows only."""
    x, weights = outliers(60, 128), normal(2, 16, 128, seed=1)
    for counts in ([20, 40], [3, 57], [4, 56]):
        (y,), kept = EmulatedFP8(WHOLE).grouped(torch.tensor(counts)).forward(x, weights)
        pieces = zip(x.split(counts), weights, strict=True)
        assert torch.equal(y, torch.cat([EmulatedFP8(WHOLE).forward(own, w)[0][0] for own, w in pieces]))
        own = [quantize(each, (0, 0)).scales.flatten().expand(len(each)) for each in x.split(counts)]
        assert torch.equal(kept[1].flatten(), torch.cat(own))


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_an_expert_whose_rows_are_not_finite_spoils_no_other(worst):
    x, d_y, weights = normal(60, 128), normal(60, 16, seed=2), normal(3, 16, 128, seed=1)
    x[25, 3] = d_y[25, 3] = worst
    products = EmulatedFP8(WHOLE).grouped(torch.tensor([20, 10, 30]))
    (y,), kept = products.forward(x, weights)
    for rows in (y, products.dgrad(d_y, weights)):
        assert rows[20:30].isnan().all()
        assert not rows[:20].isnan().any()
        assert not rows[30:].isnan().any()
    d_w = products.wgrad(d_y, kept)
    assert [each.isnan().any().item() for each in d_w] == [False, True, False]


@RECIPES
@pytest.mark.parametrize("backend", [EmulatedFP8, ScaledFP8])
def test_an_expert_whose_numbers_are_far_smaller_is_no_worse_than_others(backend, recipe, monkeypatch):
    """Rounding moves a number by 2.6% in E4M3 and 5.2% in E5M2 in the mean, a product by those of both."""
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    counts, error = [128, 0, 256], {E4M3: 0.026, E5M2: 0.052}
    x, weights, d_y = normal(384, 256), normal(3, 256, 256, seed=1), normal(384, 256, seed=2)
    x[:128], weights[0], d_y[:128] = x[:128] * 1e-4, weights[0] * 1e-4, d_y[:128] * 1e-4
    products = backend(recipe).grouped(torch.tensor(counts))
    found = products_of(products, x, weights, d_y)
    of_rows, of_both = 2**0.5 * error[E4M3], (error[E4M3] ** 2 + error[recipe.gradients] ** 2) ** 0.5
    transposed = error[E4M3] if recipe == TILED else 0.0  # what is rounded to powers of two stays
    for e, rows in ((0, slice(0, 128)), (2, slice(128, 384))):
        own_x, own_w, own_d_y = (each.double() for each in (x[rows], weights[e], d_y[rows]))
        mine = found[0][rows], found[1][rows], found[2][e]
        exact = own_x @ own_w.T, own_d_y @ own_w, own_d_y.T @ own_x
        for ours, theirs, wanted in zip(
            mine, exact, (of_rows, of_both, (of_both**2 + transposed**2) ** 0.5), strict=True
        ):
            assert ((ours - theirs).norm() / theirs.norm()).item() == pytest.approx(wanted, rel=0.1)
    assert not found[2][1].any()


@pytest.mark.parametrize("recipe", [TILED, WHOLE], ids=["tiled", "whole"])
@pytest.mark.parametrize("counts", [None, [0, 0]], ids=["one", "grouped"])
def test_no_rows_at_all(recipe, counts):
    products, weight = EmulatedFP8(recipe), normal(32, 128)
    if counts is not None:
        products, weight = products.grouped(torch.tensor(counts)), normal(2, 32, 128)
    (y,), kept = products.forward(normal(0, 128), weight)
    assert y.shape == (0, 32)
    assert products.dgrad(normal(0, 32), weight).shape == (0, 128)
    assert products.wgrad(normal(0, 32), kept).shape == weight.shape
    assert not products.wgrad(normal(0, 32), kept).any()


def test_what_is_kept_of_the_input_takes_a_byte_for_each_number():
    x = normal(256, 512)
    kept = EmulatedFP8(TILED).save_for_wgrad(x)
    assert sum(tensor.nbytes for tensor in kept) == 256 * 512 + 4 * 256 * 4


# --- in a layer -------------------------------------------------------------------------------


def layer_of(products, *, bias=True, passes=None):
    torch.manual_seed(0)
    layer = tag(nn.Linear(200, 72, bias=bias, dtype=torch.bfloat16), Role.COLUMN)
    use_gemm(layer, {"weight": products}, passes or Passes())
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_any_class_uses_what_it_was_given(bias):
    layer, x, d_y = layer_of(EmulatedFP8(TILED), bias=bias), normal(2, 65, 200), normal(2, 65, 72, seed=2)
    x.requires_grad_()
    layer(x).backward(d_y)
    products, rows = EmulatedFP8(TILED), x.detach().flatten(0, 1)
    (y,), kept = products.forward(rows, layer.weight)
    assert torch.equal(layer(x).flatten(0, 1), y + layer.bias if bias else y)
    assert torch.equal(x.grad.flatten(0, 1), products.dgrad(d_y.flatten(0, 1), layer.weight))
    d_w = products.wgrad(d_y.flatten(0, 1), kept)
    assert torch.equal(layer.weight.grad, d_w.bfloat16())
    layer.weight.grad, layer.weight.grad_dtype = None, torch.float32  # as a run has it
    layer(x).backward(d_y)
    assert torch.equal(layer.weight.grad, d_w)


def test_gradients_of_float32_products_are_autograds():
    layer, x, d_y = layer_of(Float32GEMM()), normal(3, 5, 200).requires_grad_(), normal(3, 5, 72, seed=2)
    layer(x).backward(d_y)
    exact = [each.detach().double().requires_grad_() for each in (x, layer.weight)]
    F.linear(*exact).backward(d_y.double())
    for ours, theirs in zip((x, layer.weight), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2.0**-8, atol=1e-6)


def test_weight_gradients_can_be_deferred():
    passes, x, d_y = Passes(), normal(3, 5, 200), normal(3, 5, 72, seed=2)
    layer = layer_of(EmulatedFP8(TILED), passes=passes)
    layer(x).backward(d_y)
    at_once, later = layer.weight.grad, DeferredGradients()
    layer.weight.grad, inputs = None, x.requires_grad_()
    y = layer(inputs)
    with passes.backward(later):
        y.backward(d_y)
    assert inputs.grad is not None
    assert layer.weight.grad is None
    later.compute()
    assert torch.equal(layer.weight.grad, at_once)


def test_frozen_weights_get_no_gradient():
    layer = layer_of(EmulatedFP8(TILED)).requires_grad_(False)
    x = normal(5, 200).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad.any()


def test_a_weight_is_rounded_once_while_it_stands_still_and_again_when_it_was_written():
    passes, made, weight = Passes(), [], nn.Parameter(torch.zeros(3))
    read = MadeOnce(lambda w: made.append(w.detach().clone()) or made[-1], passes)
    with passes.weights_unchanged():
        assert read(weight) is read(weight)
        with torch.no_grad():
            weight.add_(1)
        assert read(weight).sum() == 3
    memory = torch.ones(3)
    weight.data = memory
    with passes.weights_unchanged():
        assert read(weight).sum() == 3
        assert read(weight.detach()) is not read(weight)  # no parameter: it may be anything
    memory.add_(1)  # as a collective writes: the parameter's version knows nothing of it
    with passes.weights_unchanged():
        assert read(weight).sum() == 6
    assert read(weight) is not read(weight)  # outside, anything may happen between two calls


def test_a_weight_is_rounded_once_under_activation_checkpointing():
    """torch makes new objects of weights for the backward pass, each where that of another weight was."""
    passes, made = Passes(), []
    products = EmulatedFP8(TILED, OperandCache(passes))
    products.read_weight = MadeOnce(lambda w: made.append(w) or EmulatedFP8(TILED).of_weight(w), passes)
    layers = [layer_of(products, passes=passes) for _ in range(2)]
    with passes.weights_unchanged():
        for _ in range(2):
            x = normal(5, 200).requires_grad_()
            both = lambda x: layers[0](x) + layers[1](x)  # noqa: E731
            checkpoint(both, x, use_reentrant=False).sum().backward()
    assert [id(each) for each in made] == [id(layer.weight) for layer in layers]


def test_a_layer_rounds_its_weight_once_in_forward_and_backward_of_all_microbatches():
    passes, made = Passes(), []
    products = EmulatedFP8(TILED, OperandCache(passes))
    products.read_weight = MadeOnce(lambda w: made.append(w) or EmulatedFP8(TILED).of_weight(w), passes)
    layer = layer_of(products, passes=passes)
    with passes.weights_unchanged():
        for seed in range(3):
            layer(normal(5, 200, seed=seed).requires_grad_()).sum().backward()
    assert len(made) == 1


def test_layers_that_read_one_input_round_it_once_and_not_when_it_has_changed():
    made, x = [], normal(5, 200)
    remembered = Last(Passes())
    read = lambda tensor, how="": remembered.get(tensor, how, lambda: made.append(tensor.clone()) or made[-1])  # noqa: E731
    assert read(x) is read(x)
    assert read(x.view(5, 200)) is made[0]
    assert read(x, "otherwise") is not made[0]
    assert torch.equal(read(x), x)
    x.add_(1)
    assert torch.equal(read(x), x)
    assert torch.equal(read(x[:, :100]), x[:, :100])
    first = normal(5, 200, seed=3)
    read(first)
    del first
    for seed in range(4):  # whatever lies where it lay
        other = normal(5, 200, seed=seed)
        assert torch.equal(read(other), other)


def test_two_runs_in_one_process_share_nothing_of_what_they_made():
    """One run's step does not make another's weights stand still, nor hold the other's last input."""
    one, other = OperandCache(Passes()), OperandCache(Passes())
    made, weight, x = [], nn.Parameter(torch.zeros(3)), normal(5, 200)
    reads = [cache.once(lambda w: made.append(w) or w.clone()) for cache in (one, other)]
    with one.passes.weights_unchanged():
        assert reads[0](weight) is reads[0](weight)
        assert reads[1](weight) is not reads[1](weight)
    layers = [EmulatedFP8(TILED, cache) for cache in (one, one, other)]
    kept = [layer.save_for_wgrad(x)[0] for layer in layers]
    assert kept[0] is kept[1]
    assert kept[2] is not kept[0]


# --- tensor cores -----------------------------------------------------------------------------


@RECIPES
@SHAPES
@pytest.mark.parametrize("counts", [None, [40, 0, 1]], ids=["one", "grouped"])
def test_what_tensor_cores_are_given_is_what_torch_asks_for_and_means_the_same(
    counts, shape, recipe, monkeypatch
):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, K, N = shape
    weight = normal(N, K, seed=1)
    ours, theirs = ScaledFP8(recipe), EmulatedFP8(recipe)
    if counts is not None:
        counts = [*counts, 0]
        M, weight = sum(counts), normal(4, N, K, seed=1)
        ours, theirs = (each.grouped(torch.tensor(counts)) for each in (ours, theirs))
    x, d_y = normal(M, K), normal(M, N, seed=2)
    found = products_of(ours, x, weight, d_y)
    for mine, other in zip(found, products_of(theirs, x, weight, d_y), strict=True):
        assert_near(mine, other)


def assert_near(found, expected):
    """Compare two products that are alike but for the order of sums, and for how bfloat16 rounds them."""
    if expected.dtype == torch.float32:  # of a weight: outliers cancel in some
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    else:
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-3)
