"""Numbers and codes of NVFP4 and NF4, against ml_dtypes and the published levels."""

from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch
from nanotrain_fp4_master import nf4, nvfp4
from nanotrain_fp4_master.pack import pack, unpack
from published import NF4_LEVELS


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """Eight steps of equal probability above the median and seven below, from half-way into the last bin."""
    offset = 0.9677083
    above = [NormalDist().inv_cdf(offset + (0.5 - offset) * step / 8) for step in range(8)]
    below = [-NormalDist().inv_cdf(offset + (0.5 - offset) * step / 7) for step in range(7)]
    expected = [x / above[0] for x in (*below, 0.0, *above[::-1])]
    assert pytest.approx(expected, abs=1e-6) == nf4.LEVELS


def test_nf4_has_the_published_levels_bit_for_bit():
    found = nf4.from_codes(torch.arange(16, dtype=torch.uint8))
    np.testing.assert_array_equal(found.numpy(), NF4_LEVELS)


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
def test_neighbors_are_next_to_each_other_and_around_the_number(form):
    numbers = sorted({*nvfp4.from_codes(torch.arange(16)).tolist()} if form is nvfp4 else nf4.LEVELS)
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = torch.cat([x * form.LARGEST, torch.tensor(numbers)])
    inner, outer = (found.tolist() for found in form.neighbors(x))
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


def test_packing_puts_the_first_of_two_codes_in_the_low_half():
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
