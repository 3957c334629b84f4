"""Masters with residuals in Triton: in its interpreter the bits of plain PyTorch; compiled for Hopper.

Triton is no requirement of this workspace, as it is large.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from nanotrain_fp4_master import packing
from nanotrain_fp4_master.blocks import NVFP4Blocks
from nanotrain_fp4_master.lowbit import Residual
from nanotrain_fp4_master.noise import first_of
from pieces import LAYOUT, master_of, numbers

from nanotrain_core.layout.placement import Placement
from nanotrain_core.testing.triton_interpreter import put_right
from nanotrain_core.testing.triton_kernels import launches, resources, run_in_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    put_right()
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Skip where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("it needs a GPU")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("on a CPU there are no kernels but interpreted ones")
    return request.param


def values():
    """Yield masters, one after another: small and large updates, outliers, zeros, what is no number."""
    value = numbers(40, 72, seed=1)
    value[3] = 0.0
    value[4] *= 1e-5
    yield value * 0.0
    yield value * 1e-7
    yield value
    for seed in range(2, 6):
        value = value + numbers(40, 72, seed=seed, scale=1e-3)
        yield value
    value = value * 1.5
    value[5, 7] = 300.0
    yield value
    value = value.clone()
    value[6, 8], value[7, 9], value[8, 10], value[3, 1] = torch.nan, torch.inf, 900.0, 0.01
    yield value
    yield value + 0.01


def states(device, monkeypatch, *, triton):
    """Return weights, residuals and loaded masters after each of the values."""
    monkeypatch.setattr(Residual, "in_triton", triton)
    precision, master = master_of(numbers(40, 72).to(device), "nvfp4", "residual")
    found = []
    for value in values():
        master.store(value.to(device))
        precision.clock.update(skipped=False)
        found.append((master.weight.clone(), master.residual.clone(), master.load()))
    return found


@needs_triton
def test_masters_are_those_of_plain_pytorch(device, monkeypatch):
    plain, ours = (states(device, monkeypatch, triton=each) for each in (False, True))
    for before, after in zip(plain, ours, strict=True):
        finite = ~before[0].isnan()
        assert torch.equal(finite, ~after[0].isnan())
        for expected, found in zip(before, after, strict=True):
            differ = ((expected != found) | (expected.signbit() != found.signbit()))[finite]
            assert not differ.any() if device == "cpu" else differ.float().mean() < 1e-3


@needs_triton
@pytest.mark.parametrize("length", [64 * 40, 64 * 17 + 32, 5, 0])
def test_packed_rows_are_those_of_plain_pytorch(length, device, monkeypatch):
    given = numbers(64 * 40, scale=0.05) * torch.logspace(-7, 2, 64 * 40)
    given[64:128], given[130], given[200] = 0.0, torch.nan, -0.0
    found = []
    for use in (False, True):
        monkeypatch.setattr(packing, "in_triton", lambda *_, use=use: use)
        form = packing.FourBits(NVFP4Blocks())
        rounded = form.rounded(given.to(device))[:length]
        rows = form.pack(rounded)
        found.append((rows, form.unpack(rows), form.pack(rounded.float())))
    for expected, ours in zip(*found, strict=True):
        number = ~expected.isnan()
        assert torch.equal(number, ~ours.isnan())
        assert torch.equal(expected[number], ours[number])
        assert torch.equal(expected[number].signbit(), ours[number].signbit())


@pytest.mark.skipif(not INTERPRETED, reason="elsewhere a CPU has no kernels")
def test_kernels_take_weights_that_follow_each_other_in_nvfp4():
    value, whole = numbers(64, 64), Placement.whole("w", (64, 64), LAYOUT)
    for form, placement, expected in (
        ("nvfp4", whole, True),
        ("nf4", whole, False),
        ("nvfp4", whole.split(0, "tp", 1, 2), True),
        ("nvfp4", whole.split(1, "tp", 1, 2), False),
    ):
        _, master = master_of(
            value[: placement.shape[0], : placement.shape[1]], form, "residual", placement=placement
        )
        assert master.in_triton == expected
        assert (first_of(master.blocks.noise.piece) is None) == (placement.shape[1] == 32)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="it is this process")
def test_in_the_interpreter():
    run_in_interpreter(Path(__file__), "-m", "not gpu", "-k", "plain_pytorch or take")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 makes functions that no compiler takes")
def test_kernels_compile_for_hopper(tmp_path):
    from nanotrain_fp4_master import triton_nvfp4

    def empty(dtype, *shape):
        return torch.empty(shape or 2**22, dtype=dtype, device="meta")

    wide, weight, residual = (empty(each) for each in (torch.float32, torch.bfloat16, torch.int8))
    with launches() as found:
        triton_nvfp4.load(weight, residual, wide)
        triton_nvfp4.pack(weight, rows := empty(torch.uint8, 2**16, 36))
        triton_nvfp4.unpack(rows)
        triton_nvfp4.store(wide, weight, residual, empty(torch.float32, 1), 2**40, -(2**62) + 1)
    for launch in found:
        taken = resources(launch.compiled(), tmp_path)
        assert taken.stack == 0
        assert taken.registers <= 128
