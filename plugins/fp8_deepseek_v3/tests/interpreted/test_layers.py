"""Products with Triton's kernels: of experts against float64, and of layers against the emulation."""

import pytest
import torch
from fp8_operands import checked_product, normal, outliers
from nanotrain_fp8_deepseek_v3 import fused, scaled
from nanotrain_fp8_deepseek_v3.first_use import disagreement
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.fused import TritonFP8
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.triton_kernels import experts
from nanotrain_fp8_deepseek_v3.triton_kernels.experts import multiply_columns, multiply_rows
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import quantize_blocks
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import quantize_transposed
from test_gemm import assert_near, layer_of, products_of_one

COUNTS = pytest.mark.parametrize(
    "counts", [[40, 0, 130, 1, 29], [0, 0, 3], [128, 256], [0, 0], [1] * 5], ids=str
)
SIZES = pytest.mark.parametrize(("K", "N"), [(128, 256), (200, 72), (16, 300)])
RECIPES = pytest.mark.parametrize(
    "recipe",
    [FP8Recipe(), FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)],
    ids=["float32", "powers"],
)


def near(found, exact, sizes, terms):
    """Float32 sums of so many products, of these sizes together, rounded to the dtype of ``found``."""
    bound = sizes * (terms * 2.0**-24) + exact.abs() * torch.finfo(found.dtype).eps
    return ((found.double() - exact).abs() <= bound).all()


@COUNTS
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("enough", [1, 1000], ids=["256 columns", "128 columns"])
def test_rows_of_each_group_are_multiplied_by_its_weight(counts, K, N, dtype, enough, monkeypatch):
    monkeypatch.setattr(experts, "ENOUGH", enough)
    M, E = sum(counts), len(counts)
    x, w = outliers(max(M, 4), K)[:M], normal(E, N, K, seed=1)
    blocks, groups = quantize_blocks(w), Groups.of(torch.tensor(counts), x.device)
    right = blocks.codes_ENK, blocks.scales_Enk
    found = multiply_rows(quantize_rows(x), right, groups, (M, N), dtype)
    assert found.dtype == dtype
    a, b = quantize(x, (1, TILE)).values().double(), quantize(w, (TILE, TILE)).values().double()
    for own, rows, w_NK in zip(found.split(counts), a.split(counts), b, strict=True):
        assert near(own, rows @ w_NK.T, rows.abs() @ w_NK.abs().T, K + 2)


@COUNTS
@SIZES
def test_the_gradient_of_each_weight_is_of_its_own_rows(counts, K, N):
    M, E = sum(counts), len(counts)
    x, d_y = outliers(max(M, 4), K)[:M], normal(M, N, seed=1)
    groups = Groups.of(torch.tensor(counts), x.device)
    left, right = quantize_transposed(d_y, groups), quantize_transposed(x, groups)
    left[0].view(torch.uint8)[:, groups.tiles[-1] * TILE :] = 0x7F  # NaN where nothing was written
    found = multiply_columns(left, right, groups, (N, K))
    assert found.shape == (E, N, K)
    for d_w, own, rows in zip(found, d_y.split(counts), x.split(counts), strict=True):
        a, b = (quantize(each, (TILE, 1)).values().double() for each in (own, rows))
        assert near(d_w, a.T @ b, a.abs().T @ b.abs(), len(rows) + 2)


def test_one_tile_that_is_not_finite_spoils_its_rows_and_no_others():
    counts, K, N = [5, 0, 140], 256, 130
    x, w = normal(145, K), normal(3, N, K, seed=1)
    x[7, 130], x[20, 0], w[0, 3, 4] = float("inf"), float("nan"), float("inf")
    (y,), _ = TritonFP8(FP8Recipe()).grouped(torch.tensor(counts)).forward(x, w)
    (expected,), _ = EmulatedFP8(FP8Recipe()).grouped(torch.tensor(counts)).forward(x, w)
    assert torch.equal(y.isnan(), expected.isnan())
    assert expected.isnan().any(1).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 7, 20]


@COUNTS
@SIZES
@RECIPES
def test_products_of_experts_are_the_emulations(counts, K, N, recipe):
    M, E = sum(counts), len(counts)
    x, w, d_y = outliers(max(M, 4), K)[:M], normal(E, N, K, seed=1), outliers(max(M, 4), N, seed=2)[:M]
    found, expected = (
        products_of_one(products(recipe).grouped(torch.tensor(counts)), x, w, d_y)
        for products in (TritonFP8, EmulatedFP8)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert_near(ours, theirs)


@SIZES
@RECIPES
@pytest.mark.parametrize("M", [0, 1, 130])
def test_products_of_one_weight_are_the_emulations(M, K, N, recipe, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    x, w, d_y = outliers(max(M, 4), K)[:M], normal(N, K, seed=1), outliers(max(M, 4), N, seed=2)[:M]
    found, expected = (products_of_one(products(recipe), x, w, d_y) for products in (TritonFP8, EmulatedFP8))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert_near(ours, theirs)


@SIZES
@RECIPES
@pytest.mark.parametrize("counts", [None, [40, 0, 130, 1, 29], [0, 0]], ids=str)
def test_a_wgrad_that_waited_has_the_same_bits(counts, K, N, recipe, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, products = 130 if counts is None else sum(counts), TritonFP8(recipe)
    products = products if counts is None else products.grouped(torch.tensor(counts))
    x, d_y = outliers(max(M, 4), K)[:M], outliers(max(M, 4), N, seed=2)[:M]
    at_once, later = (
        products.wgrad(d_y, products.save_for_wgrad(x)),
        products.defer_wgrad(d_y, products.save_for_wgrad(x)),
    )
    d_y.zero_()
    assert torch.equal(later(), at_once)


def test_a_layer_and_its_gradients_are_the_emulations(monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    results = []
    for products in (TritonFP8(FP8Recipe()), EmulatedFP8(FP8Recipe())):
        layer, x = layer_of(products), normal(2, 65, 200).requires_grad_()
        y = layer(x)
        y.backward(normal(2, 65, 72, seed=2))
        results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    for ours, theirs in zip(*results, strict=True):
        assert_near(ours, theirs)


def test_what_is_kept_means_what_the_emulation_keeps():
    x = outliers(131, 300)
    kept, expected = (
        products(FP8Recipe(quantize_swiglu=True)).save_for_wgrad(x) for products in (TritonFP8, EmulatedFP8)
    )
    assert torch.equal(dequantize(*kept, E4M3), dequantize(*expected, E4M3))
    backends = [products(FP8Recipe(quantize_swiglu=True)) for products in (TritonFP8, EmulatedFP8)]
    ours, theirs = (each.dequantize(each.quantize(x), torch.bfloat16) for each in backends)
    assert torch.equal(ours, theirs)
    assert TritonFP8(FP8Recipe()).quantize(x) is None


def test_the_check_of_first_use_passes_here_and_sees_a_kernel_that_rounds_otherwise(monkeypatch):
    """One weight is multiplied by torch's product, which a CPU has not: by that of the codes here."""
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    here = torch.device("cpu")
    disagreement.cache_clear()
    assert disagreement(here) == ""
    disagreement.cache_clear()
    monkeypatch.setattr(fused, "quantize_rows", coarser)
    assert disagreement(here) == "its y of a weight is not that of the emulation on cpu"
    disagreement.cache_clear()


def coarser(x_RC, *args, **options):
    """Round to a bit less."""
    codes, scales = quantize_rows(x_RC, *args, **options)
    return (codes.view(torch.uint8) & 0xFE).view(codes.dtype), scales
