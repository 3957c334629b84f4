"""Every backend that can run on this machine makes the products of the rounded operands in float64.

The emulation does everywhere, the others on a GPU where there is one. Codes and scales are equal bit for bit.
Of a product, tensor cores keep about 14 bits of each sum of 128 terms before they add it in float32
(DeepSeek-V3, section 3.3.2), and results are rounded to bfloat16.
"""

import pytest
import torch
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.backends import BACKENDS
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, TILE, quantise
from nanotrain_fp8_deepseek_v3.products import Recipe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECIPES = [
    Recipe(),
    Recipe(input_power_of_two=True, gradient_power_of_two=True),
    Recipe(tile=0, gradients=E5M2),
]
RUNNABLE = [
    pytest.param(name, recipe, id=f"{name}-{number}")
    for name, backend in BACKENDS.items()
    for number, recipe in enumerate(RECIPES)
    if not backend.refusal(DEVICE, recipe)
]


def operands(M=512, K=640, N=384):
    torch.manual_seed(0)
    x, w, d_y = torch.randn(M, K), torch.randn(N, K) / 16, torch.randn(M, N)
    x[:, 7] *= 300
    d_y[3] *= 1e-4
    return [each.bfloat16().to(DEVICE) for each in (x, w, d_y)]


def products_of(products, x, w, d_y):
    (y,), kept = products.forward(x, w)
    return y, products.input_gradient(d_y, w), products.weight_gradient(d_y, kept)


@pytest.mark.parametrize(("name", "recipe"), RUNNABLE)
def test_products(name, recipe):
    x, w, d_y = operands()
    found = products_of(BACKENDS[name].make(recipe), x, w, d_y)
    expected = by_definition(recipe, x, w, d_y)
    sizes = [x.abs() @ w.abs().T, d_y.abs() @ w.abs(), d_y.abs().T @ x.abs()]
    for ours, theirs, size in zip(found, expected, sizes, strict=True):
        bound = size.double() * 2.0**-12 + theirs.abs() * 2.0**-7
        assert ((ours.double() - theirs).abs() <= bound).all()


def by_definition(recipe, x, w, d_y):
    """Return the three products in float64, of operands rounded along what is summed over."""
    row, column = ((1, TILE), (TILE, 1)) if recipe.tile else ((0, 0), (0, 0))
    inputs, powers = recipe.input_power_of_two, recipe.gradient_power_of_two
    rounded_x = quantise(x, row, power_of_two=inputs).values()
    turned_x = quantise(rounded_x, column, power_of_two=inputs).values() if recipe.tile else rounded_x
    block = quantise(w, (recipe.tile, recipe.tile)).values().double()
    rows, columns = (
        quantise(d_y, tile, recipe.gradients, power_of_two=powers).values().double() for tile in (row, column)
    )
    return rounded_x.double() @ block.T, rows @ block, columns.T @ turned_x.double()


QUANTISERS = [scaled.quantise_tiles]
if not BACKENDS["triton"].refusal(DEVICE, Recipe()):
    from nanotrain_fp8_deepseek_v3 import kernels

    QUANTISERS.append(kernels.quantise_tiles)


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=lambda function: function.__module__)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_codes_and_scales(quantiser, power_of_two, turned, form):
    x, _, _ = operands(M=333, K=259)
    x[5, 9], x[6, 200], x[7] = float("inf"), float("nan"), 0.0
    x = x.T if turned else x
    codes, scales = quantiser(x, form, power_of_two=power_of_two)
    expected = quantise(x, (1, TILE), form, power_of_two=power_of_two)
    assert codes.shape == (len(x), -(-x.shape[1] // TILE) * TILE)
    assert not codes[:, x.shape[1] :].float().nan_to_num(0.0).any()
    assert scales.stride(0) == 1
    ours, theirs = codes[:, : x.shape[1]].float(), expected.codes().float()
    assert torch.equal(ours.nan_to_num(1e9), theirs.nan_to_num(1e9))
    assert torch.equal(scales.nan_to_num(1e9), expected.scales.flatten(1).nan_to_num(1e9))
