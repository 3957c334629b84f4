"""Packed weights hold every number of their format, and behave as parameters do, or refuse."""

from types import SimpleNamespace

import pytest
import torch
from nanotrain_fp4_master import nvfp4
from nanotrain_fp4_master.blocks import NF4Blocks, NVFP4Blocks, in_triton
from nanotrain_fp4_master.packing import FourBits
from torch import nn

from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.gemm import TorchGEMM
from nanotrain_core.precision.quantized_storage import (
    PackedWeight,
    dequantize,
    memory_like,
    move_into,
    range_of,
    requantize,
    storage_of,
)
from nanotrain_core.testing import Case
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import train

FORMS = [FourBits(NVFP4Blocks()), *(FourBits(NF4Blocks(block)) for block in (64, 32, 16))]
BYTES = {16: 36, 64: 34, 32: 36}


def normal(*shape, seed=0, scale=0.05):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def corpus():
    """Yield flat weights: ordinary ones, and those that formats are bad at."""
    yield normal(4096)
    yield normal(77)  # the last row and the last block are ragged
    yield normal(1)
    yield torch.zeros(200)
    yield torch.full((130,), -3.0)
    yield normal(512) * torch.logspace(-9, 2, 512)
    yield torch.cat([normal(64), torch.zeros(64), torch.tensor([1000.0]), normal(100, scale=1e-30)])
    yield normal(256).index_fill_(0, torch.tensor([3]), torch.inf)
    yield normal(256).index_fill_(0, torch.tensor([200]), torch.nan)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("number", range(9))
def test_what_is_packed_comes_back_bit_for_bit(form, number):
    numbers = form.rounded(list(corpus())[number])
    rows = form.pack(numbers)
    assert rows.shape == (-(-len(numbers) // 64), form.width)
    found = form.unpack(rows)[: len(numbers)]
    assert torch.equal(found.isnan(), numbers.isnan())
    known = ~numbers.isnan()
    assert_bitwise({"numbers": found[known]}, {"numbers": numbers[known]}, form.name)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rounding_what_was_rounded_changes_nothing(form):
    for numbers in corpus():
        once = form.rounded(numbers)
        torch.testing.assert_close(form.rounded(once), once, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rounding_the_whole_changes_nothing_of_parts_that_were_rounded_apart(form):
    """As ranks round their ranges, each under its own scale, and as a checkpoint is read into the whole."""
    numbers = torch.cat([form.rounded(normal(640, seed=seed, scale=10.0**-seed)) for seed in (0, 6)])
    assert numbers[640:].count_nonzero() > 400
    assert torch.equal(form.rounded(numbers), numbers)


def test_rows_take_the_bits_a_weight_that_the_formats_promise():
    assert [form.width * 8 / 64 for form in FORMS] == [4.5, 4.25, 4.5, 5.0]


def test_every_scale_that_nvfp4_has_under_a_power_of_two_has_a_byte_of_its_own():
    mantissas = torch.arange(8, 16) / 8
    scales = torch.cat([mantissas * 2.0**power for power in range(-24, 7)])[:-1]
    assert scales.max() == nvfp4.LARGEST_SCALE == nvfp4.LARGEST_WEIGHT / 6 == 112
    stored = nvfp4.to_bytes(scales.unsqueeze(1))
    assert len(stored.unique()) == len(scales) == 31 * 8 - 1
    assert torch.equal(nvfp4.from_bytes(stored).flatten(), scales)


def test_a_scale_that_nvfp4_has_not_is_none_rather_than_another():
    scales = torch.tensor([[120.0], [512.0], [3e38], [torch.inf], [torch.nan]])
    assert nvfp4.from_bytes(nvfp4.to_bytes(scales)).isnan().all()


# --- as parameters ------------------------------------------------------------------------------------


def packed(value, form=FORMS[0]):
    return nn.Parameter(PackedWeight.of(value.bfloat16(), form))


def test_a_packed_parameter_has_the_shape_dtype_and_gradient_of_its_numbers():
    weight = packed(normal(24, 32))
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((24, 32), torch.bfloat16, True)
    assert isinstance(weight, nn.Parameter)
    assert storage_of(weight).nbytes == 24 * 32 * 36 // 64
    weight.backward(torch.ones(24, 32, dtype=torch.bfloat16))
    assert torch.equal(weight.grad, torch.ones(24, 32, dtype=torch.bfloat16))


def test_reading_unpacks_and_writing_in_place_rounds_and_packs():
    start = normal(16, 64)
    weight = packed(start)
    plain = FORMS[0].rounded(start.bfloat16().flatten()).view(16, 64)
    with torch.no_grad():
        assert torch.equal(weight + 0, plain)
        assert torch.equal(weight.float(), plain.float())
        assert torch.equal(torch.zeros_like(plain).copy_(weight), plain)
        weight.mul_(2)
        assert torch.equal(dequantize(weight), plain * 2)
        weight.copy_(normal(16, 64, seed=3))
        assert torch.equal(
            dequantize(weight).flatten(), FORMS[0].rounded(normal(16, 64, seed=3).bfloat16().flatten())
        )
        weight.fill_(torch.nan)
        assert dequantize(weight).isnan().all()


@pytest.mark.parametrize(
    "write", [lambda w: w.mul_(2), lambda w: w.copy_(normal(16, 64))], ids=["mul", "copy"]
)
def test_torch_counts_what_its_operations_write(write):
    """By this, checkpoints know what they need not write again."""
    weight = packed(normal(16, 64))
    before = storage_of(weight)._version
    with torch.no_grad():
        write(weight)
    assert storage_of(weight)._version > before


@pytest.mark.parametrize(
    "look", [lambda w: w.view(-1), lambda w: w[0], lambda w: w.T, lambda w: w.detach().reshape(-1)[:3]]
)
def test_a_view_of_its_memory_is_refused_since_writing_to_it_would_be_lost(look):
    weight = packed(normal(16, 64))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="dequantize"):
        look(weight)


def test_ranges_share_the_rows_of_the_whole_and_can_live_elsewhere():
    weight = packed(normal(10, 30))  # 300 weights, five rows
    memory = memory_like(weight, 7)
    before = dequantize(weight).clone()
    move_into(weight, memory[2:])
    assert_bitwise({"weight": dequantize(weight)}, {"weight": before}, "moved")
    part = range_of(weight.detach(), 128, 300)
    part.write(0, 172, torch.zeros(172))
    assert dequantize(weight).flatten()[128:].count_nonzero() == 0
    assert torch.equal(dequantize(weight).flatten()[:128], before.flatten()[:128])
    assert memory[:2].count_nonzero() == 0
    requantize(weight, before)
    assert torch.equal(dequantize(weight), before)


def test_products_with_packed_weights_are_those_with_their_numbers():
    weight, plain = packed(normal(48, 64)), FORMS[0].rounded(normal(48, 64).bfloat16().flatten()).view(48, 64)
    x, d_y = normal(10, 64, seed=1).bfloat16(), normal(10, 48, seed=2).bfloat16()
    products = DequantizingGEMM(TorchGEMM())
    assert torch.equal(products.forward(x, weight)[0][0], products.forward(x, plain)[0][0])
    assert torch.equal(products.forward(x, weight)[0][0], x @ plain.T)
    assert torch.equal(products.dgrad(d_y, weight), d_y @ plain)


# --- in a run -----------------------------------------------------------------------------------------


def trained(packed, variant):
    """Return losses and weights after four steps."""
    config = {"variant": variant, "packed": packed}
    overrides = {"optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}}
    found = train(
        Case("precision", use="fp4_master", config=config, overrides=overrides), {"run": {"steps": 4}}
    )
    return [report.loss for report in found.reports], {b.name: b.tensor for b in found.weights}


@pytest.mark.parametrize(
    "variant", ["residual", *(pytest.param(v, marks=pytest.mark.full) for v in ("eco", "naive"))]
)
def test_a_run_does_not_depend_on_how_weights_are_held(variant):
    """Every loss and every bit of every weight."""
    losses, weights = trained(True, variant)
    others, wanted = trained(False, variant)
    assert losses == others
    assert_bitwise(weights, wanted, "packed")


def test_whether_a_gpu_has_kernels_is_asked_within_a_graph():
    """Layers that unpack weights are compiled whole; a stand-in is on a GPU where there is none."""
    there = SimpleNamespace(is_cuda=True, is_contiguous=lambda: True)
    asked = torch.compile(lambda x: x + int(in_triton(there, NF4Blocks(64))), fullgraph=True, backend="eager")
    assert asked(torch.zeros(1)).item() == 0
