"""Codes and scales of every kernel against formats.py, bit for bit, on numbers chosen to be difficult."""

import pytest
import torch
from fp8_codes import ALL, DTYPES, FORMATS, POWERS, SHAPES, assert_same, numbers
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import quantize_blocks
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import (
    quantize_transposed,
    requantize_transposed,
)
from torch.utils._python_dispatch import TorchDispatchMode


@ALL
@SHAPES
@POWERS
@FORMATS
@DTYPES
def test_rows(corpus, shape, power_of_two, form, dtype):
    x = numbers(corpus, shape, dtype)
    codes, scales = quantize_rows(x, form, power_of_two=power_of_two)
    assert codes.shape == (-(-shape[0] // 16) * 16, -(-shape[1] // TILE) * TILE)
    assert scales.stride(0) == 1
    assert_same(codes, scales, quantize(x, (1, TILE), form, power_of_two=power_of_two))


@ALL
@SHAPES
@POWERS
@FORMATS
def test_columns_are_stored_transposed(corpus, shape, power_of_two, form):
    x = numbers(corpus, shape, torch.bfloat16)
    codes, scales = quantize_transposed(x, None, form, power_of_two=power_of_two)
    assert codes.shape == (-(-shape[1] // 16) * 16, -(-shape[0] // TILE) * TILE)
    assert_same(codes, scales, quantize(x.T, (1, TILE), form, power_of_two=power_of_two))


@ALL
@SHAPES
@POWERS
def test_what_was_rounded_along_rows_is_rounded_once_more_along_columns(corpus, shape, power_of_two):
    once = quantize(numbers(corpus, shape), (1, TILE), power_of_two=power_of_two)
    codes, scales = once.codes(), once.scales.flatten(1)
    found = requantize_transposed(codes, scales, power_of_two=power_of_two)
    again = dequantize(codes, scales, E4M3).T
    assert_same(*found, quantize(again, (1, TILE), power_of_two=power_of_two))


@ALL
@SHAPES
def test_blocks_are_stored_in_both_directions(corpus, shape):
    w = torch.stack([numbers(corpus, shape), numbers("normal", shape)])
    blocks = quantize_blocks(w)
    for e, w_NK in enumerate(w):
        ways = (
            (blocks.codes_ENK[e], blocks.scales_Enk[e], w_NK),
            (blocks.codes_EKN[e], blocks.scales_Ekn[e], w_NK.T),
        )
        for codes, scales, way in ways:
            expected = quantize(way, (TILE, TILE))
            own, c = expected.scales.flatten(1).shape
            assert scales.shape == (own, -(-c // 4) * 4)
            assert not scales[:, c:].any()
            per_row = scales[:, :c].repeat_interleave(TILE, 0)
            expected.scales = expected.scales.repeat_interleave(TILE, 0)[: way.shape[0]]
            assert_same(codes, per_row, expected)


@pytest.mark.parametrize("counts", [[40, 0, 130, 1, 29], [0, 0, 3], [128, 256], [0, 0]], ids=str)
@POWERS
def test_tiles_begin_anew_in_each_group(counts, power_of_two):
    x = numbers("outliers", (max(sum(counts), 1), 70), torch.bfloat16)[: sum(counts)]
    rows, groups = (
        quantize(x, (1, TILE), power_of_two=power_of_two),
        Groups.of(torch.tensor(counts), x.device),
    )
    coded = rows.codes(), rows.scales.flatten(1)
    ways = (
        (quantize_transposed(x, groups, power_of_two=power_of_two), x),
        (requantize_transposed(*coded, groups, power_of_two=power_of_two), dequantize(*coded, E4M3)),
    )
    for (codes, scales), values in ways:
        assert codes.shape[1] <= sum(counts) + TILE * len(counts)
        assert scales.shape[1] * TILE == codes.shape[1]
        tile = 0
        for own in torch.split(values, counts):
            tiles = -(-len(own) // TILE)
            part = slice(tile * TILE, (tile + tiles) * TILE), slice(tile, tile + tiles)
            if len(own):
                expected = quantize(own.T, (1, TILE), power_of_two=power_of_two)
                assert_same(codes[:, part[0]], scales[:, part[1]], expected)
            tile += tiles


@pytest.mark.parametrize("turn", [lambda x: x.T, lambda x: x[::2, ::3], lambda x: x[5:, 7:]])
def test_operands_may_lie_in_any_way(turn):
    x = turn(numbers("outliers", (150, 290), torch.bfloat16))
    assert not x.is_contiguous()
    assert_same(*quantize_rows(x), quantize(x, (1, TILE)))
    assert_same(*quantize_transposed(x), quantize(x.T, (1, TILE)))
    blocks, expected = quantize_blocks(x), quantize(x, (TILE, TILE))
    assert torch.equal(blocks.codes_ENK[0, : x.shape[0], : x.shape[1]].float(), expected.codes().float())


def test_no_rows_are_no_codes():
    codes, scales = quantize_rows(torch.empty(0, 200))
    assert (codes.shape, scales.shape) == ((0, 256), (0, 2))
    codes, scales = quantize_transposed(torch.empty(0, 200))
    assert (codes.shape, scales.shape) == ((208, 0), (208, 0))


@pytest.mark.parametrize(("width", "filled"), [(512, 0), (300, 1)])
def test_scales_of_a_weight_are_filled_up_with_zeros_only_where_there_is_something_to_fill(width, filled):
    class Fills(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += "zero" in str(operator)
            return operator(*args, **(kwargs or {}))

    w = torch.ones(512, width)
    with Fills() as fills:
        blocks = quantize_blocks(w)
    assert fills.count == filled
    assert blocks.scales_Enk.shape == (1, 4, 4)
    assert not blocks.scales_Enk[:, :, -(-width // TILE) :].any()
