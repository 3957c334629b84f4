"""Every backend that can run on this machine makes the products of the rounded operands in float64.

The emulation does everywhere, the others on a GPU where there is one. Codes and scales are equal bit for bit.
Of a product, tensor cores keep about 14 bits of each sum of 128 terms before they add it in float32
(DeepSeek-V3, section 3.3.2). y and dx are rounded to bfloat16, dW is not.
"""

import pytest
import torch
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.backends import BACKENDS
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.gemm import Recipe
from nanotrain_fp8_deepseek_v3.scratch import Scratch

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


def operands(M=512, K=640, N=384, experts=()):
    torch.manual_seed(0)
    x, w, d_y = torch.randn(M, K), torch.randn(*experts, N, K) / 16, torch.randn(M, N)
    x[:, 7] *= 300
    d_y[3:4] *= 1e-4
    return [each.bfloat16().to(DEVICE) for each in (x, w, d_y)]


def products_of(products, x, w, d_y):
    (y,), kept = products.forward(x, w)
    return y, products.dgrad(d_y, w), products.wgrad(d_y, kept)


@pytest.mark.parametrize(("name", "recipe"), RUNNABLE)
def test_gemm(name, recipe):
    x, w, d_y = operands()
    assert_near(
        products_of(BACKENDS[name].make(recipe, Scratch()), x, w, d_y),
        by_definition(recipe, x, w, d_y, once=name == "te"),
    )


@pytest.mark.parametrize(("name", "recipe"), RUNNABLE)
@pytest.mark.parametrize("counts", [[40, 0, 300, 1, 171], [0, 0, 3, 0, 0], [128, 128, 0, 128, 256]], ids=str)
def test_products_of_experts(name, recipe, counts):
    """The counts lie where the rows do, as a router hands them over."""
    x, w, d_y = operands(sum(counts), experts=(len(counts),))
    grouped = BACKENDS[name].make(recipe, Scratch()).grouped(torch.tensor(counts, device=DEVICE))
    y, d_x, d_w = products_of(grouped, x, w, d_y)
    pieces = zip(*(each.split(counts) for each in (x, d_y, y, d_x)), w, d_w, strict=True)
    for own_x, own_d_y, own_y, own_d_x, own_w, own_d_w in pieces:
        if not len(own_x):
            assert not own_d_w.any()
            continue
        expected = by_definition(recipe, own_x, own_w, own_d_y, once=name == "te")
        assert_near((own_y, own_d_x, own_d_w), expected)


def assert_near(found, expected):
    """Compare each product with its definition, element by element, by the sizes of what is added up."""
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for ours, (theirs, size) in zip(found, expected, strict=True):
        bound = size * 2.0**-12 + theirs.abs() * torch.finfo(ours.dtype).eps
        assert ((ours.double() - theirs).abs() <= bound).all()


def by_definition(recipe, x, w, d_y, *, once):
    """Return the three products of operands rounded along what is summed over, and their sizes: float64.

    ``once``: x along its columns is not rounded from what was rounded along its rows.
    """
    row, column = ((1, TILE), (TILE, 1)) if recipe.tile else ((0, 0), (0, 0))
    inputs, powers = recipe.input_power_of_two, recipe.gradient_power_of_two
    rounded_x = quantize(x, row, power_of_two=inputs).values()
    transposed_x = rounded_x
    if recipe.tile:
        transposed_x = quantize(x if once else rounded_x, column, power_of_two=inputs).values()
    block = quantize(w, (recipe.tile, recipe.tile)).values()
    rows, columns = (
        quantize(d_y, tile, recipe.gradients, power_of_two=powers).values() for tile in (row, column)
    )
    pairs = ((rounded_x, block.T), (rows, block), (columns.T, transposed_x))
    return [(a.double() @ b.double(), a.double().abs() @ b.double().abs()) for a, b in pairs]


needs_triton = pytest.mark.skipif(
    bool(BACKENDS["triton"].refusal(DEVICE, Recipe())), reason="Triton's kernels need a GPU and Triton"
)


def along_rows(x, form, power_of_two):
    from nanotrain_fp8_deepseek_v3.triton_kernels.rows import quantize_rows

    return quantize_rows(x, form, power_of_two=power_of_two)


def along_columns(x, form, power_of_two):
    from nanotrain_fp8_deepseek_v3.triton_kernels.transposed import quantize_transposed

    return quantize_transposed(x.T, None, form, power_of_two=power_of_two)


def by_torch(x, form, power_of_two):
    return scaled.quantize_tiles(x, form, power_of_two=power_of_two)


@pytest.mark.parametrize(
    "quantizer",
    [by_torch, *(pytest.param(each, marks=needs_triton) for each in (along_rows, along_columns))],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_codes_and_scales(quantizer, power_of_two, transposed, form):
    x, _, _ = operands(M=333, K=259)
    x[5, 9], x[6, 200], x[7] = float("inf"), float("nan"), 0.0
    x = x.T if transposed else x
    assert_same(*quantizer(x, form, power_of_two), quantize(x, (1, TILE), form, power_of_two=power_of_two))


@needs_triton
def test_codes_and_scales_of_what_is_rounded_once_more():
    from nanotrain_fp8_deepseek_v3.triton_kernels.transposed import requantize_transposed

    x, _, _ = operands(M=333, K=259)
    once = quantize(x, (1, TILE))
    codes, scales = once.codes(), once.scales.flatten(1)
    found = requantize_transposed(codes, scales, power_of_two=False)
    assert_same(*found, quantize(dequantize(codes, scales, E4M3).T, (1, TILE)))


@needs_triton
def test_codes_and_scales_of_stacked_weights():
    from nanotrain_fp8_deepseek_v3.triton_kernels.blocks import quantize_blocks

    _, w, _ = operands(K=259, N=333, experts=(3,))
    blocks = quantize_blocks(w)
    for e, w_NK in enumerate(w):
        ways = ((blocks.codes_ENK, blocks.scales_Enk, w_NK), (blocks.codes_EKN, blocks.scales_Ekn, w_NK.T))
        for codes, scales, way in ways:
            expected = quantize(way, (TILE, TILE))
            expected.scales = expected.scales.repeat_interleave(TILE, 0)[: len(way)]
            width = -(-way.shape[1] // TILE)
            assert_same(codes[e], scales[e, :, :width].repeat_interleave(TILE, 0), expected)


def assert_same(codes, scales, expected):
    """Compare bits of codes and scales; what fills them up is zero, or NaN in a tile that is NaN."""
    own, (R, C) = expected.codes(), expected.shape
    assert codes.shape[1] == -(-C // TILE) * TILE
    assert not codes[R:].float().nan_to_num(0.0).any()
    assert not codes[:R, C:].float().nan_to_num(0.0).any()
    nan = own.float().isnan()
    assert torch.equal(codes[:R, :C].float().isnan(), nan)
    assert torch.equal(*(each.contiguous().view(torch.uint8)[~nan] for each in (codes[:R, :C], own)))
    assert torch.equal(scales[:R].nan_to_num(1e9), expected.scales.flatten(1).nan_to_num(1e9))
