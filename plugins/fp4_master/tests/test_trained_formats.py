"""What training rounds weights to, and holds, is what the formats' definitions say, bit for bit.

Where it is meant to be something else, that is what is asserted.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import published
import pytest
import torch
from nanotrain_fp4_master import FP4MasterConfig
from nanotrain_fp4_master.blocks import NF4Blocks, NVFP4Blocks, stochastic_round, to_nearest
from nanotrain_fp4_master.packing import FourBits
from nanotrain_fp4_master.precision import FP4Master
from pieces import LAYOUT
from published import CORPUS, blocks_of, largest_of
from torch import nn

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize, storage_of

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SIZES = {"nvfp4": (16,), "nf4": (64, 32, 16)}
FORMATS = [(form, size) for form, sizes in SIZES.items() for size in sizes]
OF = {"nvfp4": NVFP4Blocks, "nf4": NF4Blocks}


# --- what is expected ---------------------------------------------------------------------------------


def power_of(blocks):
    """Return the exponent of the tensor's scale.

    The least by which the largest scale, to four significant bits, is below 448; from -18 to -2, which is
    also what it is beside a number that is none.
    """
    largest = np.abs(blocks).max() / np.float32(6)
    fits = (p for p in range(-18, -2) if largest < 432 * 2.0**p)  # half-way from 416 to 448
    return next(fits, -2)


def without_scale(blocks, power):
    """Return for each block whether it is zero here: its scale, to four significant bits, is below 2^-6.

    Published, E4M3's subnormal numbers are scales, too, with fewer bits.
    """
    return largest_of(blocks) / np.float32(6) < (1 - 2.0**-5) * 2.0 ** (power - 6)


def expected(x, form, size):
    """Return what training rounds numbers to: as blocks, bfloat16 numbers in float32."""
    blocks = blocks_of(x, size)
    if form == "nf4":
        with np.errstate(over="ignore"):
            return (
                published.nf4(blocks, ml_dtypes.bfloat16)
                .numbers.astype(ml_dtypes.bfloat16)
                .astype(np.float32)
            )
    power = power_of(blocks)
    numbers = published.nvfp4(blocks, 2.0**power).numbers
    return np.where(without_scale(blocks, power), np.copysign(np.float32(0), blocks), numbers)


def assert_bits(found, wanted):
    """Compare float32 numbers by their bits, but NaN as NaN."""
    found, wanted = (np.ascontiguousarray(each, dtype=np.float32).ravel() for each in (found, wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[known].view(np.int32), wanted[known].view(np.int32))


def rounded(x, form, size):
    """Return what an update rounds to."""
    blocks = torch.tensor(blocks_of(x, size))
    return to_nearest(blocks, OF[form](size).fit(blocks.abs().max()))


# --- rounding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "size"), FORMATS)
@pytest.mark.parametrize("name", CORPUS)
def test_updates_round_as_the_definition_says(name, form, size):
    assert_bits(rounded(CORPUS[name], form, size).numpy(), expected(CORPUS[name], form, size))


#: Where blocks have E4M3 scales that are subnormal under the tensor's.
SUBNORMAL = {"many sizes", "beside the smallest scale", "beside large", "beside infinity"}


@pytest.mark.parametrize("name", CORPUS)
def test_blocks_are_published_nvfp4_under_the_same_tensor_scale_but_where_scales_are_subnormal(name):
    """There they are zeros. Nothing else is excepted, not even what is not finite."""
    blocks = blocks_of(CORPUS[name], 16)
    power = power_of(blocks)
    scale = NVFP4Blocks().fit(torch.tensor(blocks).abs().max()).tensor_scale
    assert scale.item() == 2.0**power or not blocks.any()
    wanted = published.nvfp4(blocks, 2.0**power).numbers
    found = rounded(CORPUS[name], "nvfp4", 16).numpy()
    other = ((found != wanted) & ~(np.isnan(found) & np.isnan(wanted))).any(axis=1)
    assert (found[other] == 0).all()
    assert other.any() == (name in SUBNORMAL)
    assert without_scale(blocks, power)[other].all()


@pytest.mark.parametrize("name", ["normal", "outlier column", "odd length", "all equal", "levels"])
def test_nf4_differs_from_the_published_by_two_roundings_to_bfloat16(name):
    """Of the scale and of the weight, each by up to 2^-8 of it."""
    blocks = blocks_of(CORPUS[name], 64)
    wanted = published.nf4(blocks).numbers
    found = rounded(CORPUS[name], "nf4", 64).numpy()
    same = published.nf4(blocks).codes == published.nf4(blocks, ml_dtypes.bfloat16).codes
    assert same.mean() > 0.99
    assert (np.abs(found - wanted)[same] <= ((1 + 2.0**-8) ** 2 - 1) * np.abs(wanted)[same]).all()


# --- packing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "size"), FORMATS)
@pytest.mark.parametrize("name", CORPUS)
def test_what_is_rounded_is_packed_and_comes_back(name, form, size):
    packing = FourBits(OF[form](size))
    numbers = rounded(CORPUS[name], form, size).flatten()
    assert_bits(packing.unpack(packing.pack(numbers.bfloat16()))[: len(numbers)].float(), numbers)


def parts_of(rows, count, size):
    """Return the codes, [N, B], and the bytes of scales, [N, ...], of rows."""
    rows = rows.numpy()
    codes = np.stack([rows[:, :32] & 15, rows[:, :32] >> 4], axis=-1).reshape(-1, size)[:count]
    return codes, rows[:, 32:].reshape(len(rows) * 64 // size, -1)[:count]


@pytest.mark.parametrize("name", CORPUS)
def test_rows_have_the_codes_of_nvfp4_and_its_scales_times_that_of_the_tensor(name):
    """Eight steps of a byte are one of the exponent. 0 is no scale, and 1 one that is not a number."""
    blocks, packing = blocks_of(CORPUS[name], 16), FourBits(NVFP4Blocks())
    power = power_of(blocks)
    wanted = published.nvfp4(blocks, 2.0**power)
    lost, none = without_scale(blocks, power), np.isnan(wanted.numbers).any(axis=1, keepdims=True)
    codes, scales = parts_of(packing.pack(rounded(CORPUS[name], "nvfp4", 16).flatten()), len(blocks), 16)
    signs = np.where(np.signbit(blocks), 8, 0)
    np.testing.assert_array_equal(codes, np.where(lost & ~none, signs, wanted.codes))
    held = wanted.scales.view(np.uint8).astype(int) + 8 * (power + 18)
    np.testing.assert_array_equal(scales, np.where(none, 1, np.where(lost, 0, held)))


@pytest.mark.parametrize("size", [64, 32, 16])
@pytest.mark.parametrize("name", sorted(CORPUS.keys() - {"bfloat16 subnormals"}))
def test_rows_have_the_codes_of_nf4_and_scales_in_bfloat16(name, size):
    """Where scales have all of their bits: else several codes mean one number."""
    blocks, packing = blocks_of(CORPUS[name], size), FourBits(NF4Blocks(size))
    with np.errstate(over="ignore"):
        wanted = published.nf4(blocks, ml_dtypes.bfloat16)
    codes, scales = parts_of(packing.pack(rounded(CORPUS[name], "nf4", size).flatten()), len(blocks), size)
    np.testing.assert_array_equal(codes, wanted.codes)
    none = np.isnan(wanted.numbers).any(axis=1)
    np.testing.assert_array_equal(scales[~none], wanted.scales.view(np.uint8)[~none])
    assert np.isnan(scales[none].copy().view(ml_dtypes.bfloat16).astype(np.float32)).all()


def holds(blocks, form, size):
    """Return for each block whether it is one of the format already, under any scale of a tensor."""
    if form == "nf4":
        found = [expected(blocks, form, size)]
    else:
        found = [
            np.where(without_scale(blocks, p), np.float32(0), published.nvfp4(blocks, 2.0**p).numbers)
            for p in range(-18, -1)
        ]
    return np.logical_or.reduce([(each == blocks).all(axis=1, keepdims=True) for each in found])


@pytest.mark.parametrize(("form", "size"), FORMATS)
@pytest.mark.parametrize("name", CORPUS)
def test_what_is_written_to_a_packed_weight_is_rounded_so_unless_it_is_of_the_format(name, form, size):
    """As from a checkpoint: blocks that were rounded under a smaller scale of a tensor stay."""
    x = CORPUS[name].ravel()
    x = np.concatenate(
        [x, np.resize(x, -len(x) % size), expected(x * np.float32(2.0**-8), form, size).ravel()]
    )
    blocks = blocks_of(x, size)
    found = FourBits(OF[form](size)).rounded(torch.tensor(x))
    assert_bits(found.float(), np.where(holds(blocks, form, size), blocks, expected(x, form, size)))


@pytest.mark.parametrize(("form", "size"), FORMATS)
@pytest.mark.parametrize("name", CORPUS)
def test_what_is_rounded_at_random_is_of_the_format_too_and_is_packed_without_loss(name, form, size):
    """What has no place is NaN, whichever way the rest falls."""
    with np.errstate(over="ignore"):
        x = CORPUS[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    blocks, packing = torch.tensor(blocks_of(x, size)), FourBits(OF[form](size))
    wanted = np.isnan(expected(x, form, size))
    for turn in range(5):
        noise = torch.rand(len(blocks), size + 1, generator=torch.Generator().manual_seed(turn))
        noise = noise.mul(2**16).floor().div(2**16)
        form_of_all = packing.form.fit(blocks.abs().max())
        found = stochastic_round(blocks, form_of_all, noise[:, 1:], noise[:, :1])
        np.testing.assert_array_equal(found.isnan().numpy(), wanted)
        assert (holds(found.numpy(), form, size) | wanted.any(axis=1, keepdims=True)).all()
        assert_bits(packing.unpack(packing.pack(found.flatten()))[: found.numel()].float(), found)


# --- as a run holds it --------------------------------------------------------------------------------


def master_of(numbers, form, size, variant, *, packed):
    """Return the master of a matrix of one row that begins as ``numbers``, in bfloat16, and the matrix."""
    config = FP4MasterConfig(format=form, block_size=size, variant=variant, packed=packed)
    value = torch.tensor(numbers).bfloat16().view(1, -1)
    held = PackedWeight.of(value, FourBits(OF[form](size))) if packed else value
    parameter = nn.Parameter(held, requires_grad=False)
    piece = Piece(parameter, Placement.whole("layers.0.w", value.shape, LAYOUT))
    return FP4Master(config).master(piece.weight, piece), parameter


def refused(numbers, form):
    """Return whether the format has no place for a weight of these, which are bfloat16 numbers."""
    largest = np.abs(numbers).max()
    return not (largest <= 696 if form == "nvfp4" else np.isfinite(largest))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("variant", ["residual", "eco", "naive"])
@pytest.mark.parametrize(("form", "size"), FORMATS)
def test_a_run_begins_with_weights_rounded_so_or_is_refused(form, size, variant, packed):
    """Packed it holds the same numbers, in the bytes that the format takes."""
    for x in CORPUS.values():
        with np.errstate(over="ignore"):
            numbers = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        if refused(numbers, form):
            with pytest.raises(
                NanotrainError, match=r"^layers\.0\.w: its largest weight is .*precision\.keep"
            ):
                master_of(numbers, form, size, variant, packed=packed)
            continue
        _, weight = master_of(numbers, form, size, variant, packed=packed)
        assert_bits(dequantize(weight).float(), expected(numbers, form, size).ravel()[: x.size])
        width = 32 + 64 // size * {"nvfp4": 1, "nf4": 2}[form]
        assert storage_of(weight).nbytes == (-(-x.size // 64) * width if packed else 2 * x.size)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("variant", ["residual", "naive"])
@pytest.mark.parametrize(("form", "size"), FORMATS)
def test_an_update_leaves_weights_rounded_so(form, size, variant, packed):
    """Float32 numbers, onto zeros; what has no place becomes NaN, with its block, in master and weight."""
    for x in CORPUS.values():
        master, weight = master_of(np.zeros_like(x), form, size, variant, packed=packed)
        master.store(torch.tensor(x).view(1, -1))
        wanted = expected(x, form, size).ravel()[: x.size]
        assert_bits(dequantize(weight).float(), wanted)
        np.testing.assert_array_equal(np.isnan(master.load().numpy().ravel()), np.isnan(wanted))


@pytest.mark.parametrize("variant", ["residual", "eco", "naive"])
def test_a_weight_that_grows_beyond_the_largest_of_nvfp4_is_told_by_nan(variant):
    """A residual first holds what the weight no longer can, up to where the scale would be rounded anew."""
    master, weight = master_of(np.full(48, 660.0), "nvfp4", 16, variant, packed=True)
    value = torch.full((1, 48), 672.0)
    master.store(value)
    assert (dequantize(weight) == 672).all()
    value[0, 16:32] = 720.0
    master.store(value)
    if variant == "residual":
        assert (dequantize(weight) == 672).all()
        assert master.load()[0, 16:32].tolist() == pytest.approx([720.0] * 16, abs=1)
        value[0, 16:32] = 730.0
        master.store(value)
    beyond = torch.arange(48) // 16 == 1
    assert master.load()[0].isnan().equal(beyond)
    assert dequantize(weight)[0].isnan().equal(beyond)
    assert (dequantize(weight)[0, ~beyond] == 672).all()


# --- what it costs ------------------------------------------------------------------------------------


def error_of(found, x):
    """Return the relative error in the 2-norm."""
    return np.linalg.norm(found.astype(np.float64) - x) / np.linalg.norm(x.astype(np.float64))


def measured(what, x):
    """Yield rows of the README's table."""
    for form, size in (("nvfp4", 16), ("nf4", 64)):
        blocks = blocks_of(x, size)
        scale = published.usual_tensor_scale(blocks)
        usual = (published.nvfp4(blocks, scale) if form == "nvfp4" else published.nf4(blocks)).numbers
        found = rounded(x, form, size).numpy()
        errors = f"{error_of(usual, blocks):.3%} | {error_of(found, blocks):.3%}"
        yield f"| {what} | `{form}` | {errors} | {(found != usual).mean():.0%} |"


def test_the_readme_has_the_measured_errors_of_both_as_published_and_as_trained():
    random = np.random.default_rng(7)
    normal = random.standard_normal((1024, 256)) * 0.05
    column = normal.copy()
    column[:, 0] *= 1000
    for what, x in (("normal", normal), ("one column 1000 times as large", column)):
        for row in measured(what, x.astype(np.float32)):
            assert row in README.splitlines(), row
