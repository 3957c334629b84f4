"""Scales and codes are quotients, rounded once, on every device.

On CUDA ``tensor / number`` is ``tensor * (1 / number)``, the reciprocal rounded first
(BinaryDivTrueKernel.cu: "compute a * reciprocal(b)"), which moves the last bit of more than half of all
quotients by 448. There is no GPU here: a dispatch mode divides as CUDA does, another refuses such divisions.
"""

from math import frexp

import pytest
import torch
from nanotrain_fp4_master.blocks import NF4Blocks, NVFP4Blocks, stochastic_round, to_nearest
from nanotrain_fp4_master.lowbit import follow, residual_of, units
from nanotrain_fp4_master.packing import FourBits
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, TILE, dequantize, quantize, quantize_groups
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.precision import Codec
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.optim import moments

TILES = {"row": (1, TILE), "column": (TILE, 1), "block": (TILE, TILE), "tensor": (0, 0)}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


class DividesAsCUDA(TorchDispatchMode):
    """Has a division by a number be the product with its rounded reciprocal."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_division(func) and is_number(args[1]):
            dtype = torch.promote_types(args[0].dtype, torch.float32)
            reciprocal = 1 / torch.tensor(args[1], dtype=dtype)
            product = args[0].to(dtype) * reciprocal
            return args[0].copy_(product) if func._schema.is_mutable else product.to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Refuses(TorchDispatchMode):
    """Fails where a quotient would have another last bit on a GPU than on a CPU.

    Powers of two are as exact divisors as factors. A factor of many bits is the reciprocal of something.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if is_division(func):
            assert not (is_number(args[1]) and bits_of(args[1]) > 1), f"{func} by the number {args[1]}"
            if isinstance(args[1], torch.Tensor):
                assert args[0].device == args[1].device, f"{func}: a divisor that lies on the CPU is a number"
        assert not name.startswith("reciprocal"), func
        if name.startswith("mul") and is_number(args[1]):
            assert bits_of(args[1]) <= 8, f"{func} by {args[1]}, a rounded reciprocal"
        return func(*args, **(kwargs or {}))


def is_division(func):
    return "div" in func.overloadpacket.__name__


def is_number(x):
    return isinstance(x, int | float)


def bits_of(number):
    """Return how many significant bits a number has."""
    mantissa = int(abs(frexp(number)[0]) * 2**53)
    return 0 if not mantissa else mantissa.bit_length() - (mantissa & -mantissa).bit_length() + 1


def numbers(*shape, seed=0):
    """Return numbers of all sizes, a row and a column of outliers, and zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.randint(-20, 20, (*shape[:-1], 1), generator=draw).exp2()
    x[..., 3] *= 2.0**13
    x[..., 5, :] = 0.0
    return x


# --- what is quantized ------------------------------------------------------------------------------


def tiles(tile, form, power_of_two, device="cpu"):
    """Return codes, scales and values of a tensor of three dtypes."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(200, 300).to(dtype).to(device)
        tiled = quantize(x, TILES[tile], FORMATS[form], power_of_two=power_of_two)
        found += [tiled.codes(), tiled.scales, tiled.values()]
        found.append(quantize(x, TILES[tile], FORMATS[form], power_of_two=power_of_two).values())
    return found


def groups(form, power_of_two, device="cpu"):
    tiled = quantize_groups(
        numbers(70, 60).to(device), [30, 0, 39, 1], FORMATS[form], power_of_two=power_of_two
    )
    return [tiled.codes(), tiled.scales, tiled.values()]


def torch_operands(form, power_of_two, device="cpu"):
    x = numbers(200, 300).bfloat16().to(device)
    return list(scaled.quantize_tiles(x, FORMATS[form], power_of_two=power_of_two))


def once_more(device="cpu"):
    tiled = quantize(numbers(200, 300).bfloat16().to(device), (1, TILE))
    return [dequantize(tiled.codes(), tiled.scales.flatten(1), E4M3)]


def dispatched(device="cpu"):
    rows = numbers(50, 200).bfloat16().to(device)
    coded = Codec().encode(rows)
    return [coded, Codec().decode(coded, 200, torch.bfloat16)]


def gemms(recipe, counts=None, device="cpu"):
    """Return y, dx and dW of the emulation."""
    M = 96 if counts is None else sum(counts)
    x, d_y = (numbers(M, width, seed=width).bfloat16().to(device) for width in (160, 144))
    weight = numbers(*(() if counts is None else (len(counts),)), 144, 160).bfloat16().to(device)
    emulated = EmulatedFP8(recipe)
    emulated = emulated if counts is None else emulated.grouped(torch.tensor(counts))
    (y,), kept = emulated.forward(x, weight)
    return [*kept, y, emulated.dgrad(d_y, weight), emulated.wgrad(d_y, kept)]


FP8 = {
    **{
        f"{tile}-{form}-{power}": lambda device="cpu", how=(tile, form, power): tiles(*how, device)
        for tile in TILES
        for form in FORMATS
        for power in (False, True)
    },
    **{
        f"{name.__name__}-{form}-{power}": lambda device="cpu", how=(name, form, power): how[0](
            *how[1:], device
        )
        for name in (groups, torch_operands)
        for form in FORMATS
        for power in (False, True)
    },
    "once more": once_more,
    "dispatched": dispatched,
    **{
        f"gemms-{name}-{number}": lambda device="cpu", how=(recipe, counts): gemms(*how, device)
        for number, counts in enumerate((None, [40, 0, 56]))
        for name, recipe in {
            "tiles": FP8Recipe(),
            "powers": FP8Recipe(input_power_of_two=True, gradient_power_of_two=True),
            "tensor": FP8Recipe(tile=0, gradients=E5M2),
        }.items()
    },
}


def four_bits(form):
    """Return blocks rounded to nearest and at random, packed, unpacked, and a master beside them."""
    blocks = numbers(400, 16) * 2.0**-20
    draw = torch.Generator().manual_seed(1)
    noise, of_scales = torch.rand(400, 16, generator=draw), torch.rand(400, 1, generator=draw)
    of_all = form.fit(blocks.abs().max())
    near = to_nearest(blocks, of_all)
    packing = FourBits(form)
    packed = packing.pack(packing.rounded(near.flatten()))
    moved, parts = follow(blocks * 1.0078125, near, of_all, noise)
    return [
        near,
        stochastic_round(blocks, of_all, noise, of_scales),
        packed,
        packing.unpack(packed),
        units(near, form.scales_of(near), of_all),
        *residual_of(blocks, near, of_all, noise),
        moved,
        parts,
    ]


def eight_bit_moments():
    """Return the moments that every code means, and the codes of some moments."""
    codes = torch.arange(256).float()
    found = [moments.expand_second(codes), moments.expand_first(codes[:128] - 64)]
    ratio = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    return [*found, moments.compress_second(ratio), moments.compress_first(2 * ratio - 1)]


ALL = {
    **FP8,
    "nvfp4": lambda: four_bits(NVFP4Blocks()),
    "nf4": lambda: four_bits(NF4Blocks(16)),
    "moments": eight_bit_moments,
}


# --- tests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_bits_are_the_same_where_a_division_by_a_number_is_a_product(name):
    expected = ALL[name]()
    with DividesAsCUDA():
        found = ALL[name]()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (ours, theirs)))


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_divided_by_a_number_nor_multiplied_by_a_reciprocal(name):
    with Refuses():
        ALL[name]()


@pytest.mark.parametrize("name", [name for name in FP8 if not name.endswith("-1")])
def test_divisors_lie_where_the_dividend_does(name):
    """On another device than the CPU a tensor that was left there would be a number again."""
    with Refuses():
        FP8[name](device="meta")


def test_both_modes_see_what_was_wrong():
    """58% of scales had another last bit on an H100, as 448 is 7 times a power of two."""
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1e-3
    with DividesAsCUDA():
        found = amax / 448.0
        in_place = amax.clone().div_(448.0)
    assert torch.equal(found, in_place)
    assert 0.4 < (found != amax / 448.0).float().mean() < 0.7
    assert torch.equal(amax / torch.tensor(448.0), amax / 448.0)
    for wrong in (
        lambda: amax / 448.0,
        lambda: amax.clone().div_(6),
        lambda: amax * (1 / 448.0),
        lambda: 1 / amax,
        lambda: amax.to("meta") / torch.tensor(448.0),
    ):
        with pytest.raises(AssertionError), Refuses():
            wrong()
    for right in (lambda: amax / 2, lambda: amax * 0.375, lambda: amax / amax.new_full((), 448.0)):
        with Refuses():
            right()
