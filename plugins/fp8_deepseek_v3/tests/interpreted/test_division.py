"""The quotients of the kernels are those of a division, for every kind of scale."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from nanotrain_fp8_deepseek_v3.triton_kernels.arithmetic import divided, scale_of

COUNT = 4096


@triton.jit
def divide(x_ptr, scale_ptr, q_ptr, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(q_ptr + i, divided(tl.load(x_ptr + i), tl.load(scale_ptr + i)))


def quotients(x, scale):
    q = torch.empty_like(x)
    divide[(len(x) // COUNT,)](x, scale, q, COUNT=COUNT)
    return q.numpy()


def same(found, expected):
    return (found.view(np.int32) == expected.view(np.int32)) | (np.isnan(found) & np.isnan(expected))


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_they_are_rounded_once(narrow):
    """All that are not rounded to zero: from 2^-11 to the largest, of scales of all sizes."""
    rng, count = np.random.default_rng(0), 256 * COUNT
    scale = rng.uniform(1, 2, count).astype(np.float32)
    last = rng.integers(0, 2, count) == 0
    scale.view(np.uint32)[last] |= 0x007FFFF8  # nearly or quite two, where reciprocals are worst
    scale *= np.exp2(rng.integers(-126, 118, count)).astype(np.float32)
    x = (scale * rng.uniform(1, 2, count) * np.exp2(rng.integers(-11, 8, count))).astype(np.float32)
    x = torch.from_numpy(x).bfloat16().float().numpy() if narrow else x
    found = quotients(torch.from_numpy(x), torch.from_numpy(scale))
    assert same(found, x / scale).all()


def test_the_quotients_nearest_to_a_middle_between_two_numbers_are_rounded_to_the_right_one():
    """(2 - 2^-23) q = 2 (1 - 2^-24) q: a unit above q, as x = 2 has it, is a hair above the middle."""
    scale = np.float32(2 - 2.0**-23)
    x = np.resize(np.exp2(np.arange(-30, 30, dtype=np.float32)), COUNT)
    found = quotients(torch.from_numpy(x), torch.full((COUNT,), float(scale)))
    assert same(found, x / scale).all()
    assert (found > x / 2).all()


@pytest.mark.parametrize("scale", [2.0**-126, 1.0, float("inf"), float("nan")])
def test_zeros_keep_their_sign_and_what_is_not_finite_stays(scale):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), -(2.0**-149)])
    scales = torch.full_like(x, scale)
    found = quotients(x.repeat(COUNT // 8), scales.repeat(COUNT // 8))[:8]
    expected = (x / scales).numpy()
    if np.isfinite(scale):  # infinite numbers have infinite scales
        assert same(found[[0, 1, 7]], expected[[0, 1, 7]]).all()
    else:
        assert same(found, expected).all()


@triton.jit
def scales(bits_ptr, scale_ptr, LARGEST: tl.constexpr, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(scale_ptr + i, scale_of(tl.load(bits_ptr + i), LARGEST, False))


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_scales_are_those_of_a_division(largest):
    """Of magnitudes of all sizes, of all that are near a power of two, and of those that are not finite."""
    rng, count = np.random.default_rng(0), 128 * COUNT
    bits = rng.integers(0, 0x7F800000, count).astype(np.int32)
    near = (rng.integers(1, 255, COUNT) << 23) + rng.integers(-64, 64, COUNT)
    bits[:COUNT] = near
    bits[-3:] = 0, 0x7F800000, 0x7FC00000
    found = torch.empty(count)
    scales[(count // COUNT,)](torch.from_numpy(bits), found, LARGEST=largest, COUNT=COUNT)
    expected = np.maximum(bits.view(np.float32) / np.float32(largest), np.float32(2.0**-126))
    assert same(found.numpy(), expected).all()
