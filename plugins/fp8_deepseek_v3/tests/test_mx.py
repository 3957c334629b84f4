"""MXFP8: blocks of 32 against the specification and torchao, and the products of its three GEMMs."""

import re
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_corpus import CORPUS
from fp8_operands import checked_product, normal, outliers
from nanotrain_fp8_deepseek_v3 import backends, first_use, scaled, scaled_mx
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.dry import DryMX
from nanotrain_fp8_deepseek_v3.formats import E4M3, quantize
from nanotrain_fp8_deepseek_v3.mx import EmulatedMX, e8m0, mx_recipe
from nanotrain_fp8_deepseek_v3.scaled_mx import ScaledMX, swizzled
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm

#: Of all elements of a block whose scale is NaN; any code would do.
CODE_OF_NAN = 0x7F
ROUNDINGS = pytest.mark.parametrize("rounding", ["ceil", "floor"])
SHAPES = pytest.mark.parametrize("shape", [(96, 128, 256), (70, 200, 72), (5, 32, 16)], ids=str)
COUNTS = pytest.mark.parametrize("counts", [None, [40, 0, 64, 1, 29], [0, 0]], ids=str)

# --- blocks -----------------------------------------------------------------------------------------


def specified(x, rounding):
    """Return codes, and scales in E8M0, of rows whose length is a multiple of 32, block by block.

    Section 6.3 of the specification ("floor"), or the least power of two not below amax / 448 ("ceil").
    """
    codes, scales = np.empty(x.shape, np.uint8), np.empty((len(x), x.shape[1] // 32), np.uint8)
    for r, row in enumerate(x):
        for c, block in enumerate(np.split(row, len(row) // 32)):
            amax = np.abs(block).max()
            if not np.isfinite(amax):
                codes[r, c * 32 : c * 32 + 32], scales[r, c] = CODE_OF_NAN, 255
                continue
            fraction, exponent = np.frexp(amax)  # in [0.5, 1)
            exponent = exponent - 9 + (rounding == "ceil" and fraction > 448 / 512) if amax else -127
            exponent = max(exponent, -127)
            quotients = np.clip(block / 2.0**exponent, -448, 448)
            codes[r, c * 32 : c * 32 + 32] = quotients.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            scales[r, c] = exponent + 127
    return codes, scales


def bytes_of(blocks):
    """Return codes and scales of blocks of 1 x 32 as the bytes that a GPU reads."""
    scales = e8m0(blocks.scales.flatten(1))
    codes = blocks.codes().view(torch.uint8)
    return torch.where((scales == 255).repeat_interleave(32, 1), CODE_OF_NAN, codes), scales


@ROUNDINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("corpus", CORPUS)
def test_codes_and_scales_are_those_of_the_specification(corpus, dtype, rounding):
    x = torch.from_numpy(CORPUS[corpus](40, 96).astype(np.float32)).to(dtype)
    codes, scales = specified(x.double().numpy(), rounding)
    found = bytes_of(quantize(x, (1, 32), e8m0=rounding))
    assert np.array_equal(found[1].numpy(), scales)
    assert np.array_equal(found[0].numpy(), codes)
    across = quantize(x.T.contiguous(), (32, 1), e8m0=rounding)
    assert torch.equal(
        across.values().T.nan_to_num(1e9), quantize(x, (1, 32), e8m0=rounding).values().nan_to_num(1e9)
    )


#: What torchao's ``to_mx`` returns for a block with this largest element, its negative third and its
#: thousandth, with RCEIL and with FLOOR: the scale, and the three codes (torchao at 21 August 2026).
TORCHAO = [
    ("448.0", (127, [126, 241, 46]), (127, [126, 241, 46])),
    ("0x1.c00002p+8", (128, [118, 233, 38]), (127, [126, 241, 46])),
    ("449.0", (128, [118, 233, 38]), (127, [126, 241, 46])),
    ("447.0", (127, [126, 241, 46]), (127, [126, 241, 46])),
    ("1.0", (119, [120, 235, 40]), (119, [120, 235, 40])),
    ("1.75", (119, [126, 241, 46]), (119, [126, 241, 46])),
    ("1.7578125", (120, [118, 233, 38]), (119, [126, 241, 46])),
    ("0.0", (0, [0, 128, 0]), (0, [0, 128, 0])),
    ("0x1p-130", (0, [32, 147, 0]), (0, [32, 147, 0])),
    ("0x1.cp-120", (0, [118, 233, 38]), (0, [118, 233, 38])),
    ("0x1.c8p-119", (1, [118, 234, 39]), (0, [126, 242, 47])),
    ("3e38", (247, [118, 233, 38]), (246, [126, 241, 46])),
    ("inf", (255, [CODE_OF_NAN] * 3), (255, [CODE_OF_NAN] * 3)),
    ("nan", (255, [CODE_OF_NAN] * 3), (255, [CODE_OF_NAN] * 3)),
]


@pytest.mark.parametrize(("largest", "rceil", "floor"), TORCHAO)
def test_codes_and_scales_are_those_of_torchao(largest, rceil, floor):
    number = float.fromhex(largest) if "x" in largest else float(largest)
    x = torch.zeros(1, 32)
    x[0, 3], x[0, 9], x[0, 20] = number, -number / 3, number / 1000
    for rounding, (scale, wanted) in (("ceil", rceil), ("floor", floor)):
        codes, scales = bytes_of(quantize(x, (1, 32), e8m0=rounding))
        assert (scales.item(), codes[0, [3, 9, 20]].tolist()) == (scale, wanted)


def test_only_floor_clips():
    """Elements between 448 and 512 times the scale become 448 times it, up to an eighth less."""
    x = torch.tensor([[1.99, *[0.5] * 31]])
    assert quantize(x, (1, 32), e8m0="floor").values()[0, 0] == 1.75
    assert quantize(x, (1, 32), e8m0="ceil").values()[0, 0] == 2.0


# --- products ---------------------------------------------------------------------------------------


def products_of(products, x, weight, d_y):
    (y,), kept = products.forward(x, weight)
    return y, products.dgrad(d_y, weight), products.wgrad(d_y, kept)


def by_definition(x, w, d_y, rounding):
    """Return the three products in float64, each of operands rounded along what it sums over."""

    def rounded(operand, tile):
        return quantize(operand, tile, e8m0=rounding).values().double()

    row, column = (1, 32), (32, 1)
    return (
        rounded(x, row) @ rounded(w, row).T,
        rounded(d_y, row) @ rounded(w, column),
        rounded(d_y, column).T @ rounded(x, column),
    )


def assert_near(found, expected):
    """Compare by the size of the result: float32 sums in another order, and results rounded to bfloat16."""
    for ours, theirs in zip(found, expected, strict=True):
        rtol = 1e-5 if ours.dtype == torch.float32 else 2.0**-8
        atol = 1e-5 * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


@ROUNDINGS
@SHAPES
def test_the_emulation_multiplies_what_was_rounded_and_rounds_nothing_else(shape, rounding):
    M, K, N = shape
    x, w, d_y = outliers(M, K), normal(N, K, seed=1), outliers(M, N, seed=2)
    found = products_of(EmulatedMX(mx_recipe(rounding)), x, w, d_y)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_near(found, by_definition(x, w, d_y, rounding))


@pytest.mark.parametrize(("rounding", "error"), [("ceil", 0.0375), ("floor", 0.0415)])
def test_error_of_a_product_of_normal_numbers(rounding, error):
    """With "ceil" that of tiles of 128; "floor" clips as well."""
    x, w, d_y = normal(512, 512), normal(512, 512, seed=1), normal(512, 512, seed=2)
    exact = x.double() @ w.double().T, d_y.double() @ w.double(), d_y.double().T @ x.double()
    for ours, theirs in zip(products_of(EmulatedMX(mx_recipe(rounding)), x, w, d_y), exact, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() == pytest.approx(error, rel=0.03)


def test_x_is_rounded_once_for_dw_and_not_from_its_rows():
    """Rounded twice, elements that their row lost would be lost for their column too."""
    x, d_y = normal(64, 64), normal(64, 64, seed=2)
    x[:, 0] *= 1e5  # beside it rows lose the rest
    products = EmulatedMX(mx_recipe("ceil"))
    d_w, exact = products.wgrad(d_y, products.save_for_wgrad(x)), d_y.double().T @ x.double()
    assert ((d_w - exact)[:, 1:].norm() / exact[:, 1:].norm()).item() < 0.05


@ROUNDINGS
def test_stacked_weights_are_multiplied_each_by_its_rows(rounding):
    """No block spans the rows of two."""
    counts = [40, 0, 130, 1, 29]
    x, weights, d_y = outliers(200, 130), normal(5, 48, 130, seed=1), outliers(200, 48, seed=2)
    one = EmulatedMX(mx_recipe(rounding))
    y, d_x, d_w = products_of(one.grouped(torch.tensor(counts)), x, weights, d_y)
    for e, (first, end) in enumerate(pairwise(np.cumsum([0, *counts]))):
        own = products_of(one, x[first:end], weights[e], d_y[first:end])
        assert all(
            torch.equal(*pair) for pair in zip((y[first:end], d_x[first:end], d_w[e]), own, strict=True)
        )


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_sums_alone(worst):
    x, d_y, weights = normal(60, 128), normal(60, 16, seed=2), normal(3, 16, 128, seed=1)
    x[25, 3] = d_y[25, 3] = worst
    y, d_x, d_w = products_of(
        EmulatedMX(mx_recipe("floor")).grouped(torch.tensor([20, 10, 30])), x, weights, d_y
    )
    for rows in (y, d_x):
        assert rows[25].isnan().all()
        assert not rows[:25].isnan().any()
        assert not rows[26:].isnan().any()
    assert [each.isnan().any().item() for each in d_w] == [False, True, False]


@COUNTS
@pytest.mark.parametrize("backend", [EmulatedMX, ScaledMX])
def test_a_wgrad_that_waited_has_the_same_bits(backend, counts, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, products = 70, backend(mx_recipe("ceil"))
    if counts is not None:
        M, products = sum(counts), products.grouped(torch.tensor(counts))
    x, d_y = normal(M, 200), normal(M, 72, seed=2)
    at_once = products.wgrad(d_y, products.save_for_wgrad(x))
    later = products.defer_wgrad(d_y, products.save_for_wgrad(x))
    d_y.zero_()  # whoever made it may use its memory again
    assert torch.equal(later(), at_once)
    assert at_once.any() or not M


def test_what_is_saved_of_an_input_takes_a_byte_for_each_number_and_one_for_each_block():
    x, recipe = normal(256, 512), mx_recipe("ceil")
    for products, rows in ((EmulatedMX(recipe), x), (DryMX(recipe), x.to("meta"))):
        assert sum(tensor.nbytes for tensor in products.save_for_wgrad(rows)) == 256 * 512 + 256 // 32 * 512


@pytest.mark.parametrize("backend", [EmulatedMX, ScaledMX])
def test_a_weight_is_rounded_once_a_step_both_ways(backend, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    torch.manual_seed(0)
    passes, made, products = Passes(), [], backend(mx_recipe("ceil"))
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    products.cache.passes = products.read_weight.passes = passes
    make, products.read_weight.make = products.read_weight.make, lambda w: made.append(w) or make(w)
    use_gemm(layer, {"weight": products}, passes)
    with passes.weights_unchanged():
        for seed in range(3):
            layer(normal(5, 64, seed=seed).requires_grad_()).sum().backward()
    assert len(made) == 1
    assert layer.weight.grad.any()


def test_the_monitor_counts_every_rounding():
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    passes, watch = Passes(), Watch()
    products = Watched(EmulatedMX(mx_recipe("ceil")), watch, "layer", layer)
    use_gemm(layer, {"weight": products}, passes)
    watch.begin(on=True)
    x = outliers(40, 64)
    x[:, 7] *= 1e5
    y = layer(x.requires_grad_())
    with passes.backward():
        y.backward(normal(40, 96))
    elements = {operand: tally.elements for (_, operand), tally in watch.tallies.items()}
    weight, d_y = 96 * 64, 40 * 96
    assert elements == {
        "x": 40 * 64,
        "W": weight,
        "W of dx": weight,
        "dy": d_y,
        "x of dW": 40 * 64,
        "dy of dW": d_y,
    }
    lost = {
        operand: (quantize(x.detach(), tile, e8m0="ceil").values() == 0).sum().item()
        for operand, tile in (("x", (1, 32)), ("x of dW", (32, 1)))
    }
    assert {operand: watch.tallies["layer", operand].counts[0].item() for operand in lost} == lost
    assert lost["x"] > lost["x of dW"] == 0


# --- tensor cores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 7), (300, 16)], ids=str)
def test_scales_lie_as_cublas_documents(shape):
    """In tiles of 128 x 4, those of a row of tiles one after the other."""
    R, c = shape
    scales = torch.arange(R * c).remainder(251).add(1).to(torch.uint8).view(R, c)
    found, tiles = swizzled(scales), -(-c // 4)
    assert len(found) == -(-R // 128) * tiles * 512
    for row in range(R):
        for column in range(c):
            tile, inner = row // 128 * tiles + column // 4, row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert found[tile * 512 + inner] == scales[row, column]
    assert found.count_nonzero() == R * c


@ROUNDINGS
@SHAPES
@COUNTS
def test_what_tensor_cores_are_given_is_what_torch_asks_for_and_means_the_same(
    counts, shape, rounding, monkeypatch
):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, K, N = shape
    ours, theirs, weight = (
        ScaledMX(mx_recipe(rounding)),
        EmulatedMX(mx_recipe(rounding)),
        normal(N, K, seed=1),
    )
    if counts is not None:
        M, weight = sum(counts), normal(len(counts), N, K, seed=1)
        ours, theirs = (each.grouped(torch.tensor(counts)) for each in (ours, theirs))
    x, d_y = normal(M, K), normal(M, N, seed=2)
    found, expected = (products_of(products, x, weight, d_y) for products in (ours, theirs))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    if M:
        assert_near(found, expected)


def blackwell(monkeypatch, capability=(10, 0), cuda="12.8"):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("capability", "cuda", "text"),
    [
        ((9, 0), "13.0", "blocks of 32 need compute capability 10.0 (B200), this is 9.0"),
        ((10, 0), "12.6", "blocks of 32 need CUDA 12.8, this torch was built with 12.6"),
    ],
)
def test_a_gpu_without_blocks_of_32_is_refused(capability, cuda, text, monkeypatch):
    blackwell(monkeypatch, capability, cuda)
    refusal = f"'torch', which auto chooses on cuda, cannot run: {text}; 'emulated' runs everywhere"
    with pytest.raises(NanotrainError, match=re.escape(refusal)):
        choose("auto", torch.device("cuda"), mx_recipe("ceil"))
    assert choose("emulated", torch.device("cuda"), mx_recipe("ceil")).name == "emulated"


def test_a_blackwell_is_used_if_its_products_are_those_of_the_emulation(monkeypatch):
    blackwell(monkeypatch)
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "")
    assert choose("auto", torch.device("cuda"), mx_recipe("ceil")).name == "torch"
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "its y of a weight is another")
    with pytest.raises(NanotrainError, match="cannot run: its y of a weight is another; 'emulated' runs"):
        choose("auto", torch.device("cuda"), mx_recipe("ceil"))


def test_products_of_a_device_are_compared_with_the_emulation(monkeypatch):
    """Here one that orders scales otherwise than tensor cores read them."""
    cpu, recipe = torch.device("cpu"), mx_recipe("ceil")
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    assert first_use.disagreement_of_torch.__wrapped__(cpu, recipe) == ""
    monkeypatch.setattr(scaled_mx, "swizzled", lambda scales: swizzled(scales).flip(0))
    found = first_use.disagreement_of_torch.__wrapped__(cpu, recipe)
    assert found == "its y of a weight is not that of the emulation on cpu"


def test_e4m3_is_what_gradients_are_in_too():
    assert mx_recipe("ceil").gradients == E4M3
