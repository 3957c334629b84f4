"""Numbers that are difficult to round, and codes of kernels beside those of formats.py, bit for bit."""

import numpy as np
import pytest
import torch
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2
from test_formats import CORPUS

FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (3, 127), (200, 129)], ids=str)
POWERS = pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "power_of_two"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ALL = pytest.mark.parametrize("corpus", CORPUS)


def numbers(corpus, shape, dtype=torch.float32):
    return torch.from_numpy(CORPUS[corpus](*shape).astype(np.float32)).to(dtype)


def assert_same(codes, scales, expected):
    """Compare bits of codes [R', C'] and scales [R', c]; what fills up is zero, or NaN with its tile."""
    own, (R, C) = expected.codes(), expected.shape
    nan = own.float().isnan()
    assert torch.equal(codes[:R, :C].float().isnan(), nan)
    bits = [each.contiguous().view(torch.uint8)[~nan] for each in (codes[:R, :C], own)]
    assert torch.equal(*bits)
    assert not codes[R:].float().nan_to_num(0.0).any()
    assert not codes[:R, C:].float().nan_to_num(0.0).any()
    wanted = expected.scales.flatten(1)
    assert torch.equal(scales[:R].isnan(), wanted.isnan())
    assert torch.equal(scales[:R].nan_to_num(1e9), wanted.nan_to_num(1e9))
