"""Rounding in tiles against ml_dtypes, bit for bit, on numbers chosen to be difficult."""

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_corpus import CORPUS, not_finite
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, SMALLEST_SCALE, TILE, dequantize, quantize

NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
TILES = {"row": (1, TILE), "column": (TILE, 1), "block": (TILE, TILE), "tensor": (0, 0)}


def reference(x, tile, form, *, power_of_two):
    """Return codes and values of a float32 array, tile by tile, with ml_dtypes' rounding."""
    codes, values = np.empty(x.shape, NUMPY[form]), np.empty_like(x)
    height, width = (size or length for size, length in zip(tile, x.shape, strict=True))
    largest = np.float32(ml_dtypes.finfo(NUMPY[form]).max)
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            place = slice(r, r + height), slice(c, c + width)
            scale = np.maximum(np.float32(np.abs(x[place]).max() / largest), np.float32(SMALLEST_SCALE))
            if power_of_two and np.isfinite(scale):
                scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            codes[place] = (x[place] / scale).astype(NUMPY[form])
            values[place] = codes[place].astype(np.float32) * scale
    return codes, values


#: Rows and columns: less than a tile, a tile, and tiles that the shape cuts.
SHAPES = [
    (1, 1),
    (128, 128),
    (130, 257),
    pytest.param((3, 127), marks=pytest.mark.full),
    pytest.param((200, 129), marks=pytest.mark.full),
]


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "power_of_two"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("corpus", CORPUS)
def test_codes_and_values_are_those_of_ml_dtypes(corpus, tile, power_of_two, shape, form):
    x = CORPUS[corpus](*shape).astype(np.float32)
    with np.errstate(all="ignore"):
        codes, values = reference(x, TILES[tile], form, power_of_two=power_of_two)
    found = quantize(torch.from_numpy(x), TILES[tile], form, power_of_two=power_of_two)
    assert_same_codes(found.codes(), codes)
    assert np.array_equal(found.values().numpy(), values, equal_nan=True)
    again = quantize(torch.from_numpy(x), TILES[tile], form, power_of_two=power_of_two)
    assert np.array_equal(again.values().numpy(), values, equal_nan=True)  # rounded without codes


def assert_same_codes(ours, theirs):
    """Compare bits; a NaN has several."""
    nan = np.isnan(theirs.astype(np.float32))
    assert np.array_equal(ours.float().isnan().numpy(), nan)
    assert np.array_equal(ours.view(torch.uint8).numpy()[~nan], theirs.view(np.uint8)[~nan])


@FORMATS
def test_rounding_is_torchs_conversion_for_every_bfloat16(form):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.abs() <= form.largest]
    assert torch.equal(form.round_(x.clone()), x.to(form.dtype).float())


@FORMATS
def test_codes_are_torchs_for_every_number(form):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form.dtype)
    numbers = codes.float()
    assert torch.equal((form.decode(codes) * form.half)[numbers.isfinite()], numbers[numbers.isfinite()])


@FORMATS
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "power_of_two"])
def test_tiles_that_are_not_finite_come_back_as_nan(form, power_of_two):
    tiled = quantize(torch.from_numpy(not_finite(6, 256)).float(), (1, TILE), form, power_of_two=power_of_two)
    codes, scales = tiled.codes(), tiled.scales.flatten(1)
    found, values = dequantize(codes, scales, form), tiled.values()
    assert values[0, :TILE].isnan().all()
    assert torch.equal(found.nan_to_num(1e9), values.nan_to_num(1e9))


@pytest.mark.parametrize("width", [1, 100, 128, 256, 300])
def test_codes_and_scales_give_the_values_back(width):
    tiled = quantize(torch.randn(7, width, generator=torch.Generator().manual_seed(0)), (1, TILE))
    codes, scales = tiled.codes(), tiled.scales.flatten(1)
    assert torch.equal(dequantize(codes, scales, E4M3), tiled.values())


def test_the_tensor_that_is_rounded_stays_as_it_was():
    for shape in ((128, 128), (5, 200)):
        x = torch.randn(shape)
        before = x.clone()
        quantize(x, (1, TILE)).values()
        assert torch.equal(x, before)


def test_an_element_that_is_not_finite_spoils_its_tile_and_no_other():
    x = torch.ones(4, 256)
    x[1, 130], x[2, 3] = float("inf"), float("nan")
    lost = quantize(x, (1, TILE)).values().isnan()
    expected = torch.zeros(4, 256, dtype=torch.bool)
    expected[1, 128:], expected[2, :128] = True, True
    assert torch.equal(lost, expected)


def test_stacked_weights_are_rounded_each_by_itself():
    stacked = torch.randn(3, 130, 200, generator=torch.Generator().manual_seed(0))
    together = quantize(stacked, (TILE, TILE)).values()
    for one, alone in zip(together, stacked, strict=True):
        assert torch.equal(one, quantize(alone, (TILE, TILE)).values())


def test_values_with_power_of_two_scales_are_numbers_of_bfloat16_and_are_rounded_to_themselves():
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).exp()
    values = quantize(x, (1, TILE), power_of_two=True).values().clone()
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(quantize(values, (1, TILE), power_of_two=True).values(), values)


def test_no_rows_are_no_codes():
    tiled = quantize(torch.empty(0, 200), (1, TILE))
    assert tiled.codes().shape == (0, 200)
    assert quantize(torch.empty(0, 200), (TILE, 1)).values().shape == (0, 200)
