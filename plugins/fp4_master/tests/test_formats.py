"""NVFP4 and NF4, bit by bit, against ml_dtypes and numpy following the formats' definitions."""

from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch
from nanotrain_fp4_master import nf4, nvfp4
from nanotrain_fp4_master.pack import pack, unpack

RANDOM = np.random.default_rng(5)


def outliers():
    """Return normal numbers with every seventh column a thousand times as large."""
    found = RANDOM.standard_normal((9, 48))
    found[:, ::7] *= 1000
    return found


CORPUS = {
    "zeros": np.zeros(32),
    "negative zeros": -np.zeros(16),
    "normal": RANDOM.standard_normal(4096),
    "tiny": RANDOM.standard_normal(256) * 1e-30,
    "float32 subnormals": RANDOM.standard_normal(64) * 1e-41,
    "beside large": np.concatenate([[3e5], RANDOM.standard_normal(63) * 1e-3]),
    "below all scales": np.concatenate([np.full(16, 1.0), RANDOM.standard_normal(16) * 1e-8]),
    "largest float32": np.array([3.4028235e38, -3.4028235e38, 1.0, 0.0] * 4),
    "outlier column": outliers(),
    "all equal": np.full(80, -0.3),
    "one alone": np.array([0.7]),
    "odd length": RANDOM.standard_normal(333),
    "ragged last block": RANDOM.standard_normal((5, 13)),
    "ties": np.array(
        [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 4.0]
    ),
    "levels": np.array(nf4.LEVELS * 4),
    "middles of levels": np.array([*np.convolve(nf4.LEVELS, [0.5, 0.5], "valid"), 1.0] * 4),
    "infinity": np.array([np.inf, 1.0, -np.inf, 0.0] * 8),
    "nan": np.concatenate([[np.nan], np.full(15, 2.0), RANDOM.standard_normal(48)]),
}


def blocks_of(x, size):
    flat = x.astype(np.float32).ravel()
    return np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)


def nvfp4_by_definition(x, scale):
    """Return codes, block scales and weights; numpy's arithmetic and the types of ml_dtypes."""
    blocks, scale = blocks_of(x, 16), np.float32(scale)
    with np.errstate(all="ignore"):
        sixths = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(6) / scale
        scales = np.clip(sixths, np.float32(2**-6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        whole = scale * scales.astype(np.float32)
        numbers = np.clip(blocks / whole, -6, 6)
        numbers = np.where(np.isnan(numbers), np.float32(0), numbers).astype(ml_dtypes.float4_e2m1fn)
        weights = numbers.astype(np.float32) * whole
    codes = numbers.view(np.uint8).ravel()
    packed = codes[::2] | codes[1::2] << 4
    return packed, scales.ravel(), weights.ravel()[: x.size]


def nf4_by_definition(x, size):
    """Return the same of NF4, trying every level in float64; of two as near the lower one."""
    blocks = blocks_of(x, size)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        ratio = (blocks / np.where(scales == 0, np.float32(1), scales)).astype(np.float64)
        ratio = np.where(np.isnan(ratio), 0.0, ratio)
        distances = np.abs(ratio[..., None] - np.array(nf4.LEVELS))
        codes = distances.argmin(axis=-1).astype(np.uint8)
        weights = np.array(nf4.LEVELS, dtype=np.float32)[codes] * scales
    packed = codes.ravel()[::2] | codes.ravel()[1::2] << 4
    return packed, scales.ravel(), weights.ravel()[: x.size]


def usual_scale(x):
    largest = float(np.abs(x.astype(np.float32))[np.isfinite(x)].max(initial=0.0))
    return nvfp4.tensor_scale(torch.tensor(largest)) if largest > 1e-34 else torch.tensor(2.0**-20)


@pytest.mark.parametrize("scale", ["usual", "1", "a power of two"])
@pytest.mark.parametrize("name", CORPUS)
def test_nvfp4_is_what_its_definition_says(name, scale):
    x = CORPUS[name]
    tensor = {"usual": usual_scale(x), "1": torch.tensor(1.0), "a power of two": torch.tensor(2.0**-12)}[
        scale
    ]
    packed, scales = nvfp4.quantise(torch.tensor(x.astype(np.float32)), tensor)
    wanted, wanted_scales, wanted_weights = nvfp4_by_definition(x, tensor.item())
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), wanted_scales.view(np.uint8))
    np.testing.assert_array_equal(packed.numpy(), wanted)
    weights = nvfp4.dequantise(packed, scales, tensor, x.size)
    np.testing.assert_array_equal(weights.numpy(), wanted_weights)


@pytest.mark.parametrize("size", [64, 32, 16])
@pytest.mark.parametrize("name", CORPUS)
def test_nf4_is_what_its_definition_says(name, size):
    x = CORPUS[name]
    packed, scales = nf4.quantise(torch.tensor(x.astype(np.float32)), size)
    wanted, wanted_scales, wanted_weights = nf4_by_definition(x, size)
    np.testing.assert_array_equal(scales.numpy(), wanted_scales)
    np.testing.assert_array_equal(packed.numpy(), wanted)
    weights = nf4.dequantise(packed, scales, x.size, size)
    np.testing.assert_array_equal(weights.numpy(), wanted_weights)


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """Eight steps of equal probability above the median and seven below, from half-way into the last bin."""
    offset = 0.9677083
    above = [NormalDist().inv_cdf(offset + (0.5 - offset) * step / 8) for step in range(8)]
    below = [-NormalDist().inv_cdf(offset + (0.5 - offset) * step / 7) for step in range(7)]
    expected = [x / above[0] for x in (*below, 0.0, *above[::-1])]
    assert pytest.approx(expected, abs=1e-6) == nf4.LEVELS


def test_every_bfloat16_number_becomes_the_e2m1_number_of_ml_dtypes():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    wanted = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    found = nvfp4.nearest(x)
    np.testing.assert_array_equal(found.numpy(), wanted.astype(np.float32))
    np.testing.assert_array_equal(nvfp4.to_codes(found).numpy(), wanted.view(np.uint8))


def test_codes_and_numbers_are_one_another():
    codes = torch.arange(16, dtype=torch.uint8)
    numbers = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4.from_codes(codes).numpy(), numbers)
    assert torch.equal(nvfp4.to_codes(nvfp4.from_codes(codes)), codes)
    assert torch.equal(unpack(pack(codes)), codes)


@pytest.mark.parametrize("form", [nvfp4, nf4])
def test_neighbours_are_next_to_each_other_and_around_the_number(form):
    numbers = sorted({*nvfp4.from_codes(torch.arange(16)).tolist()} if form is nvfp4 else nf4.LEVELS)
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = torch.cat([x * form.LARGEST, torch.tensor(numbers)])
    inner, outer = (found.tolist() for found in form.neighbours(x))
    places = {number: place for place, number in enumerate(numbers)}
    for number, one, other in zip(x.tolist(), inner, outer, strict=True):
        assert min(one, other) <= number <= max(one, other)
        assert abs(places[one] - places[other]) <= 1
    exact = form.nearest(torch.tensor(numbers))
    assert exact.tolist() == numbers


@pytest.mark.parametrize("form", [nvfp4, nf4])
def test_half_the_gap_is_the_most_that_rounding_to_nearest_loses(form):
    x = (torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 2 - 1) * form.LARGEST
    number = form.nearest(x)
    assert ((x - number).abs() <= form.half_gap(number) * (1 + 1e-6)).all()
    for each in number.unique():
        lost = (x - number)[number == each].abs().max()
        assert lost > 0.98 * form.half_gap(each.reshape(1)) or each.abs() == form.LARGEST


def test_a_weight_takes_four_and_a_half_bits():
    x = torch.randn(64 * 100)
    for packed, scales in (nvfp4.quantise(x, torch.tensor(0.01)), nf4.quantise(x)):
        assert (packed.nbytes + scales.nbytes) * 8 == 4.5 * x.numel()


def test_packing_puts_the_first_of_two_codes_in_the_low_half():
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
