"""MXFP8: blocks of 32 against the specification and torchao, and the products of its three GEMMs."""

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_corpus import CORPUS
from fp8_operands import RAGGED, assert_near, normal, outliers, products_of
from nanotrain_fp8_deepseek_v3.dry import DryMX
from nanotrain_fp8_deepseek_v3.formats import E4M3, quantize
from nanotrain_fp8_deepseek_v3.mx import EmulatedMX, MXRecipe, e8m0
from nanotrain_fp8_deepseek_v3.scaled_mx import swizzled
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm

#: Of all elements of a block whose scale is NaN; any code would do.
CODE_OF_NAN = 0x7F
ROUNDINGS = pytest.mark.parametrize("rounding", ["ceil", "floor"])

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


@ROUNDINGS
@RAGGED
def test_the_emulation_multiplies_what_was_rounded_and_rounds_nothing_else(shape, rounding):
    M, K, N = shape
    x, w, d_y = outliers(M, K), normal(N, K, seed=1), outliers(M, N, seed=2)
    found = products_of(EmulatedMX(MXRecipe(rounding=rounding)), x, w, d_y)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_near(found, by_definition(x, w, d_y, rounding))


@pytest.mark.parametrize(("rounding", "error"), [("ceil", 0.0375), ("floor", 0.0415)])
def test_error_of_a_product_of_normal_numbers(rounding, error):
    """With "ceil" that of tiles of 128; "floor" clips as well."""
    x, w, d_y = normal(512, 512), normal(512, 512, seed=1), normal(512, 512, seed=2)
    exact = x.double() @ w.double().T, d_y.double() @ w.double(), d_y.double().T @ x.double()
    for ours, theirs in zip(
        products_of(EmulatedMX(MXRecipe(rounding=rounding)), x, w, d_y), exact, strict=True
    ):
        assert ((ours - theirs).norm() / theirs.norm()).item() == pytest.approx(error, rel=0.03)


def test_x_is_rounded_once_for_dw_and_not_from_its_rows():
    """Rounded twice, elements that their row lost would be lost for their column too."""
    x, d_y = normal(64, 64), normal(64, 64, seed=2)
    x[:, 0] *= 1e5  # beside it rows lose the rest
    products = EmulatedMX(MXRecipe(rounding="ceil"))
    d_w, exact = products.wgrad(d_y, products.save_for_wgrad(x)), d_y.double().T @ x.double()
    assert ((d_w - exact)[:, 1:].norm() / exact[:, 1:].norm()).item() < 0.05


def test_what_is_saved_of_an_input_takes_a_byte_for_each_number_and_one_for_each_block():
    x, recipe = normal(256, 512), MXRecipe(rounding="ceil")
    for products, rows in ((EmulatedMX(recipe), x), (DryMX(recipe), x.to("meta"))):
        assert sum(tensor.nbytes for tensor in products.save_for_wgrad(rows)) == 256 * 512 + 256 // 32 * 512


def test_the_monitor_counts_every_rounding():
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    passes, watch = Passes(), Watch()
    products = Watched(EmulatedMX(MXRecipe(rounding="ceil")), watch, "layer", layer)
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


def test_e4m3_is_what_gradients_are_in_too():
    assert MXRecipe(rounding="ceil").gradients == E4M3
