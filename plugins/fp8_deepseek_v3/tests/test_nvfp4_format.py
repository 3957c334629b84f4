"""NVFP4: codes and scales against the definition, the Hadamard transform, and stochastic rounding's noise."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_corpus import CORPUS
from nanotrain_fp8_deepseek_v3.nvfp4.format import LARGEST, VALUES, pack, quantize, unpack
from nanotrain_fp8_deepseek_v3.nvfp4.hadamard import SIGNS, transform
from nanotrain_fp8_deepseek_v3.nvfp4.rounding import nearest, noise_of, stochastic
from torch.fx.experimental.proxy_tensor import make_fx

F32 = np.float32
SCALES = pytest.mark.parametrize("tensor_scale", ["power_of_two", "float32"])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def specified(x, tensor_scale, tile):
    """Return codes, E4M3 scales and the tensor scale of whole blocks, block by block, in float32.

    Appendix B of arXiv 2509.25149, or with a tensor scale that is the next power of two.
    """
    high, wide = tile
    blocks = x.reshape(x.shape[0] // high, high, x.shape[1] // wide, wide)
    of_blocks = np.abs(blocks).max((1, 3))
    amax = np.where(np.isfinite(of_blocks), of_blocks, 0).max().astype(F32)
    if tensor_scale == "float32":
        with np.errstate(over="ignore"):
            encode = min(F32(6 * 448) / amax, np.finfo(F32).max) if amax else F32(1)
        decode = F32(1) / encode
    else:
        fraction, exponent = np.frexp(max(amax / F32(6 * 448), np.finfo(F32).tiny))
        decode = F32(2.0 ** (int(exponent) - (fraction == 0.5)))
        encode = F32(1) / decode
    codes, scales = np.empty(x.shape, np.uint8), np.empty(of_blocks.shape, F32)
    for r, c in np.ndindex(*of_blocks.shape):
        place = slice(r * high, (r + 1) * high), slice(c * wide, (c + 1) * wide)
        if not np.isfinite(of_blocks[r, c]):
            scales[r, c], codes[place] = np.nan, 0
            continue
        sixth = of_blocks[r, c] / F32(6) * encode
        scales[r, c] = min(sixth, F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
        with np.errstate(divide="ignore", over="ignore"):
            factor = min(F32(1) / (scales[r, c] * decode), np.finfo(F32).max)
            ratio = np.clip(x[place] * factor, -6, 6).astype(F32)
        codes[place] = ratio.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes, scales, decode


@SCALES
@pytest.mark.parametrize("tile", [(1, 16), (16, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("corpus", CORPUS)
def test_codes_and_scales_are_those_of_the_definition(corpus, dtype, tile, tensor_scale):
    x = torch.from_numpy(CORPUS[corpus](48, 96).astype(F32)).to(dtype)
    codes, scales, decode = specified(x.float().numpy(), tensor_scale, tile)
    found = quantize(x, tile, tensor_scale=tensor_scale)
    of_blocks = found.scales.squeeze(-1).squeeze(-2).numpy()
    np.testing.assert_array_equal(of_blocks, scales)
    assert found.tensor_scale.item() == decode
    broken = np.isnan(scales).repeat(tile[0], 0).repeat(tile[1], 1)
    assert np.array_equal(found.codes().numpy()[~broken], codes[~broken])
    assert np.array_equal(found.values().isnan().numpy(), broken)
    with np.errstate(over="ignore"):
        values = np.array(VALUES, F32)[codes] * scales.repeat(tile[0], 0).repeat(tile[1], 1) * decode
    np.testing.assert_array_equal(found.values().numpy()[~broken], values[~broken])


def test_numbers_are_those_of_ml_dtypes():
    """All codes, and every tie and what lies on either side of it."""
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
    assert np.array_equal(np.array(VALUES, F32).view(np.uint32), table.view(np.uint32))
    middle = (table[:7] + table[1:8]) / 2
    x = np.concatenate([sign * np.nextafter(middle, to) for sign, to in product((1, -1), (-9, 9))] + [middle])
    expected = x.astype(F32).astype(ml_dtypes.float4_e2m1fn).astype(F32)
    assert np.array_equal(nearest(torch.from_numpy(x.astype(F32))).numpy(), expected)


@pytest.mark.parametrize("dim", [-1, -2])
def test_two_codes_lie_in_a_byte_the_first_one_low(dim):
    codes = torch.randint(16, (32, 48), generator=generator(), dtype=torch.uint8)
    packed = pack(codes, dim)
    first, second = (codes.movedim(dim, -1)[..., start::2] for start in (0, 1))
    assert torch.equal(packed.movedim(dim, -1), first + 16 * second)
    assert torch.equal(unpack(packed, dim), torch.tensor(VALUES)[codes.int()])


# --- scales -----------------------------------------------------------------------------------------


def test_both_tensor_scales_have_the_same_error():
    x = torch.randn(1024, 1024, generator=generator())
    power, float32 = (
        ((quantize(x, tensor_scale=how).values() - x).norm() / x.norm()).item()
        for how in ("power_of_two", "float32")
    )
    assert float32 == pytest.approx(0.0953, rel=0.005)
    assert power == pytest.approx(float32, rel=0.005)


def test_with_a_power_of_two_a_block_is_rounded_alike_beside_others():
    """With a float32 scale most blocks change, beside another block that is larger."""
    x = torch.randn(256, 256, generator=generator())
    beside = torch.cat([x, x.new_full((1, 256), 900.0)])
    alike = [
        (quantize(x, tensor_scale=how).values() == quantize(beside, tensor_scale=how).values()[:-1])
        .float()
        .mean()
        .item()
        for how in ("power_of_two", "float32")
    ]
    assert alike[0] == 1
    assert alike[1] < 0.7


def test_that_holds_down_to_the_smallest_normal_scale():
    """Blocks 2^13 smaller than the largest are rounded as alone; 2^15 smaller, they have fewer bits."""
    x = torch.randn(64, 16, generator=generator())
    x /= x.abs().amax(1, keepdim=True)
    for power, alike in ((13, True), (15, False)):
        beside = torch.cat([x, x.new_full((1, 16), 2.0**power)])
        assert torch.equal(quantize(beside).values()[:-1], quantize(x).values()) == alike


def test_what_an_e4m3_scale_that_was_rounded_down_leaves_above_six_saturates():
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 6 * 448, 6 * 1.06  # 1.06 becomes 1
    assert quantize(x).values()[1, 0] == 6
    ratio = torch.randn(4096, 16, generator=generator())
    source = quantize(ratio)
    exceeds = source.source.abs() / (source.scales * source.tensor_scale)
    assert 6 < exceeds.max().item() <= 6 * 17 / 16


@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("how", [{}, {"stochastically": True}, {"hadamard": True, "stochastically": True}])
def test_what_is_not_finite_makes_its_block_nan_and_leaves_others_as_they_were(worst, how):
    x = torch.randn(8, 64, generator=generator())
    x[2, 20] = 1e-3
    expected = quantize(x, **how).values()
    x[2, 20] = worst
    found = quantize(x, **how).values()
    assert found[2, 16:32].isnan().all()
    found[2, 16:32] = expected[2, 16:32] = 0
    assert torch.equal(found, expected)


def test_a_block_that_becomes_zeros_has_nothing_at_the_largest_number():
    """Its scale is 0, and so are its values, whatever the codes."""
    x = torch.ones(2, 32)
    x[0, 16:] = 1e-9
    blocks = quantize(x)
    assert torch.equal(blocks.values() != 0, x == 1)
    assert torch.equal(blocks.at_largest(), x == 1)


@SCALES
def test_zeros_stay_zero(tensor_scale):
    x = torch.zeros(3, 20)
    for how in (False, True):
        assert not quantize(x, tensor_scale=tensor_scale, stochastically=how).values().any()
    x[1, 3] = 5.0
    assert quantize(x, tensor_scale=tensor_scale, stochastically=True).values().count_nonzero() == 1


# --- the Hadamard transform -------------------------------------------------------------------------


def matrix():
    """Return H D / 4, from Sylvester's recursion."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    found = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        found = torch.kron(found, two)
    return found @ torch.diag(torch.tensor(SIGNS, dtype=torch.float64)) / 4


def test_the_transform_is_that_of_an_orthogonal_matrix():
    H, x = matrix(), torch.randn(5, 16, 3, generator=generator())
    assert torch.equal(H @ H.T, torch.eye(16, dtype=torch.float64))
    expected = torch.einsum("ij,rjc->ric", H, x.double())
    torch.testing.assert_close(transform(x, -2).double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(transform(x.mT.contiguous(), -1).mT, transform(x, -2))
    assert 4 < SIGNS.count(-1) < 12


def test_it_leaves_a_product_along_what_it_transforms_unchanged():
    d_y, x = (torch.randn(8, 16, 24, generator=generator(seed)) for seed in (0, 1))
    found = transform(d_y, -2).flatten(0, 1).double().T @ transform(x, -2).flatten(0, 1).double()
    expected = d_y.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_it_keeps_what_an_outlier_would_make_zero_and_the_mean_error_is_no_smaller():
    """Its errors are spread too: over the whole block, where they had been of the numbers that were lost."""
    x = torch.randn(4096, 16, generator=generator())
    x[:, 5] *= 40
    plain, turned = quantize(x), quantize(x, hadamard=True)
    back = turned.values() @ matrix().float()
    zeros = [(each.values() == 0).float().mean().item() for each in (plain, turned)]
    errors = [((found - x).norm() / x.norm()).item() for found in (plain.values(), back)]
    assert zeros[0] > 0.6
    assert zeros[1] < 0.1
    assert errors == pytest.approx((0.070, 0.109), rel=0.05)


# --- stochastic rounding ----------------------------------------------------------------------------


def test_it_is_unbiased():
    """The mean error of numbers that do not saturate, in units of its standard error, is that of chance."""
    x = torch.randn(2**16, 16, generator=generator()).bfloat16().float()
    x[:, 0] = 6.0  # so that all scales are the same, and exact
    x.clamp_(-6, 6)
    x[0, 0] = 6 * 448
    error = (quantize(x, stochastically=True).values() - x)[1:, 1:]
    deviations = error.mean() / (error.std() / error.numel() ** 0.5)
    assert abs(deviations.item()) < 3
    positive = x[1:, 1:] > 0  # nor towards or away from zero
    for low, high in ((0.1, 0.4), (0.6, 0.9), (2.1, 2.9), (4.2, 5.8)):
        among = positive & (x[1:, 1:] > low) & (x[1:, 1:] < high)
        own = error[among]
        assert abs((own.mean() / (own.std() / own.numel() ** 0.5)).item()) < 3.5
        assert own.numel() > 1000 or low > 4


def test_nearest_rounding_of_the_same_numbers_is_biased():
    """A number between two of the format always goes the same way."""
    x = torch.full((4096, 16), 2.3)
    x[:, 0] = 6.0
    x[0, 0] = 6 * 448
    x[1:, 1:] += torch.rand(4095, 15, generator=generator()) * 0.01
    mean_error = {
        how: (quantize(x, stochastically=how).values() - x)[1:, 1:].mean().item() for how in (False, True)
    }
    assert mean_error[False] < -0.29
    assert abs(mean_error[True]) < 0.01


def test_the_noise_is_uniform():
    """Chi-square over 256 classes, of each position and of all; 3.5 standard deviations are allowed."""
    noise = noise_of(torch.randn(2**16, 16, generator=generator()), -1)
    assert noise.min() >= 0
    assert noise.max() < 1
    for among in (*noise.T, noise.flatten()):
        counts = torch.histc(among, 256, 0, 1)
        expected = among.numel() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 3.5 * (2 * 255) ** 0.5


@pytest.mark.parametrize(
    "blocks",
    [
        torch.randn(2**15, 16, generator=torch.Generator().manual_seed(1)),
        torch.arange(2**15).view(-1, 1).float() * torch.eye(1, 16),  # they differ in one element
        torch.randint(2, (2**15, 16), generator=torch.Generator().manual_seed(2)).float(),
    ],
    ids=["normal", "counting", "bits"],
)
def test_neighbors_are_not_correlated(blocks):
    """Of elements in a block, of the same element in the next block, and of an element with its noise."""
    blocks = blocks.bfloat16().float().unique(dim=0)
    noise = noise_of(blocks, -1) - 0.5
    n = len(blocks)
    together = noise.T @ noise / n * 12
    apart = together - torch.diag(together.diag())
    assert apart.abs().max().item() < 5 / n**0.5
    along = (noise[1:] * noise[:-1]).mean(0) * 12
    assert along.abs().max().item() < 4.5 / n**0.5
    spread = blocks - blocks.mean(0)
    own = (noise * spread).mean(0) * 12**0.5 / spread.std(0).clamp_min(1e-9)
    assert own.abs().max().item() < 4.5 / n**0.5


def test_equal_blocks_have_equal_codes_wherever_they_lie_and_others_have_not():
    x = torch.randn(64, 16, generator=generator()).bfloat16()
    x[0] = 50  # of the largest scale
    alone = quantize(x, stochastically=True).codes()
    turned = quantize(x.T.contiguous(), (16, 1), stochastically=True).codes().T
    order = torch.randperm(64, generator=generator(1))
    beside = quantize(torch.cat([x[order], x[order]], 1), stochastically=True).codes()
    assert torch.equal(turned, alone)
    assert torch.equal(beside, torch.cat([alone[order], alone[order]], 1))
    assert torch.equal(quantize(x.double() * (1 + 1e-16), stochastically=True).codes(), alone)
    again = x.clone()
    again[1:, 3] += 0.25
    changed = (quantize(again, stochastically=True).codes() != alone)[1:, 4:].float().mean()
    assert 0.05 < changed < 0.6


def test_a_zero_with_a_sign_is_a_zero():
    x = torch.randn(32, 16, generator=generator())
    x[:, ::3] = 0.0
    signed = torch.where(x == 0, -0.0, x)
    assert torch.equal(noise_of(x, -1), noise_of(signed, -1))


def test_numbers_of_the_format_stay():
    x = torch.tensor(VALUES)
    assert torch.equal(stochastic(x, torch.zeros(16)), x)
    assert x.abs().max() == LARGEST


@pytest.mark.parametrize(
    ("how", "error"), [({}, 0.0953), ({"stochastically": True}, 0.137), ({"tile": (16, 16)}, 0.1113)]
)
def test_mean_error_of_normal_numbers(how, error):
    x = torch.randn(512, 512, generator=generator())
    assert ((quantize(x, **how).values() - x).norm() / x.norm()).item() == pytest.approx(error, rel=0.02)


def test_no_constant_is_copied_from_the_host_in_each_call():
    """A list that is traced is copied to the device whenever the graph runs, and the host waits for it."""
    graph = make_fx(lambda x: quantize(x, hadamard=True, stochastically=True).values())(torch.randn(4, 32))
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "nanotrain_fp8.constant.default" in names
    assert not {"aten.lift_fresh_copy.default", "aten.lift_fresh.default"} & names


@pytest.mark.full
def test_a_graph_of_the_compiler_has_the_same_bits():
    """The hash needs products modulo 2^32; the compiler computes with what it knows of indices in 64 bits."""

    def rounded(x):
        return quantize(x, hadamard=True, stochastically=True).values()

    x = torch.randn(40, 48, generator=generator()).mul_(torch.randn(40, 1, generator=generator(1)).exp())
    assert torch.equal(torch.compile(rounded, backend="inductor", fullgraph=True)(x), rounded(x))


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({}, 0.069),
        ({"stochastically": True}, 0.069),
        ({"tile": (16, 16)}, 0.101),
        ({"tile": (16, 1), "hadamard": True}, 0.069),
    ],
)
def test_share_of_normal_numbers_that_become_zero(how, share):
    """What the `fp8` monitor reports as underflow of operands without outliers."""
    blocks = quantize(torch.randn(512, 512, generator=generator()), **how)
    zeros = ((blocks.grid == 0) & (blocks.source != 0)).float().mean().item()
    assert zeros == pytest.approx(share, rel=0.03)
