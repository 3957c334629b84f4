"""What qlora holds of a frozen matrix, against the paper's definition written out, and what it refuses."""

import re
from types import SimpleNamespace

import pytest
import torch
from nanotrain_fp4_master import QLoRAConfig, check_rows
from nanotrain_fp4_master.qlora import QLoRA, check_model
from pieces import pack
from torch import nn

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import TorchGEMM
from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize, storage_of
from nanotrain_core.testing import Case

#: Appendix E of arXiv 2305.14314.
BELOW = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
BELOW += (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495)
ABOVE = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
ABOVE += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
NF4 = (*BELOW, 0.0, *ABOVE)


def by_definition(row, block):
    """Return the numbers that a row of weights stands for: each block's nearest levels times its largest."""
    found = []
    for begin in range(0, len(row), block):
        part = row[begin : begin + block]
        scale = max(abs(number) for number in part)
        nearest = (min(NF4, key=lambda level, x=x: abs(level - x / (scale or 1))) for x in part)
        found += [level * scale for level in nearest]
    return found


class Layers(nn.Module):
    """A frozen layer, one that is trained, and a frozen norm."""

    def __init__(self, width=128):
        super().__init__()
        self.frozen = tag(nn.Linear(width, 6), Role.COLUMN)
        self.trained = tag(nn.Linear(width, 6), Role.COLUMN)
        self.norm = tag(nn.RMSNorm(width), Role.NORM)
        self.requires_grad_(False).trained.requires_grad_()


def prepared(layers, **config):
    precision = QLoRA(QLoRAConfig(**config))
    precision.setup(1, Passes(), TorchGEMM())
    precision.convert(layers)
    pack(layers, precision)
    return layers


@pytest.mark.parametrize("block", [64, 32, 16])
def test_a_frozen_matrix_has_the_levels_of_the_paper_and_all_else_is_bfloat16(block):
    layers = Layers()
    with torch.no_grad():
        layers.frozen.weight.copy_(torch.randn(6, 128, generator=torch.Generator().manual_seed(3)) * 0.05)
        layers.frozen.weight[1, :64] = 0  # a block without a scale
        layers.frozen.weight[2, 7] = 30.0
    before = layers.frozen.weight.detach().bfloat16()
    prepared(layers, block_size=block)
    wanted = torch.tensor([by_definition(row, block) for row in before.tolist()]).bfloat16()
    assert torch.equal(dequantize(layers.frozen.weight), wanted)
    assert storage_of(layers.frozen.weight).nbytes == 6 * 128 / 2 + 2 * 6 * 128 / block
    assert isinstance(layers.frozen.weight, PackedWeight)
    assert not layers.frozen.weight.requires_grad
    for name, parameter in layers.named_parameters():
        assert isinstance(parameter, PackedWeight) == (name == "frozen.weight")
        assert parameter.dtype == torch.bfloat16


def test_packing_what_was_unpacked_gives_the_same_bytes():
    """So a resume from a checkpoint, which has the numbers, goes on with every bit of the run."""
    first = prepared(Layers())
    again = Layers()
    with torch.no_grad():
        again.frozen.weight.copy_(dequantize(first.frozen.weight))
    assert torch.equal(storage_of(prepared(again).frozen.weight), storage_of(first.frozen.weight))


def test_forward_and_dgrad_read_the_numbers_and_nothing_unpacked_is_held_between():
    layers = prepared(Layers())
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        y = layers.frozen(x)
    numbers = dequantize(layers.frozen.weight)
    assert torch.equal(y, x.detach() @ numbers.T + layers.frozen.bias)
    assert saved
    assert all(isinstance(each, PackedWeight) for each in saved)
    d_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    y.backward(d_y)
    assert torch.equal(x.grad, d_y @ numbers)
    assert layers.frozen.weight.grad is None


def test_original_weights_are_freed_as_they_are_packed():
    layers = Layers()
    prepared(layers)
    assert layers.frozen.weight.original.flat is None


@pytest.mark.parametrize(
    ("width", "config", "text"),
    [
        (
            96,
            {},
            "rows of 96 weights .* blocks of 64, .* precision.block_size = 32; .*keep = ..frozen.weight",
        ),
        (100, {"block_size": 16}, "rows of 100 weights are no whole number of blocks of 16"),
    ],
)
def test_rows_that_are_no_whole_number_of_blocks_are_refused(width, config, text):
    """On another layout their blocks would be others."""
    with pytest.raises(NanotrainError, match=text):
        prepared(Layers(width), **config)
    for pattern in ("frozen.*", "frozen"):
        kept = prepared(Layers(width), keep=(pattern,), **config)
        assert not isinstance(kept.frozen.weight, PackedWeight)


class Split(nn.Module):
    """A frozen COLUMN and ROW, and one of each that are kept or trained."""

    def __init__(self, width, ffn):
        super().__init__()
        self.up, self.kept = (tag(nn.Linear(width, ffn), Role.COLUMN) for _ in range(2))
        self.down, self.trained = (tag(nn.Linear(ffn, width), Role.ROW) for _ in range(2))
        self.requires_grad_(False).trained.requires_grad_()


@pytest.mark.parametrize(
    ("width", "ffn", "tp", "wanted"),
    [
        (64, 128, 2, None),
        (
            96,
            64,
            1,
            r"rows of up.weight, 96 weights on a rank, are .* blocks of 64, .* expected 32 or precision",
        ),
        (
            64,
            96,
            2,
            r"rows of down.weight, 48 weights on a rank, are .* expected 16 or .*keep = ..down.weight",
        ),
        (
            72,
            72,
            1,
            r"up.weight, 72 weights on a rank, and those of 1 more matrices .* expected precision.keep",
        ),
        (64, 63, 2, None),
    ],
)
def test_rows_of_a_rank_are_checked_on_the_model_before_ranks_start(width, ffn, tp, wanted):
    """As ranks would: of frozen matrices, without those that are kept."""
    layout = Layout({"dense": View(("dp", "tp"), (1, tp))})
    found = [*check_model(None, QLoRAConfig(keep=("kept",)), layout, lambda: Split(width, ffn))]
    assert [each.key for each in found] == ["precision.block_size"] * (wanted is not None)
    assert wanted is None or re.search(wanted, found[0].message), found


def test_the_table_compares_with_the_same_run_in_bfloat16():
    """Of 768 weights that are packed, 774 that are trained, and 134 others."""
    precision = QLoRA(QLoRAConfig())
    layers = precision.convert(Layers())
    precision.check_parts([layers], Mesh(Layout({"dense": View(("dp",), (1,))})))
    (total,) = (line for line in precision.describe() if line.startswith("  all  "))
    held, in_bf16 = ((768 * each + 774 * 6 + 134 * 2) / 1676 for each in (34 / 64, 2))
    assert total.endswith(f"1,676 x {held:.4g} bytes; bf16 with float32 masters: {in_bf16:.4g}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("load_in_4bit", True),
        ("bnb_4bit_quant_type", "nf4"),
        ("bnb_4bit_use_double_quant", True),
        ("bnb_4bit_compute_dtype", "bfloat16"),
        ("bnb_4bit_quant_storage", "uint8"),
        ("llm_int8_skip_modules", ["lm_head"]),
    ],
)
def test_keys_of_transformers_bitsandbytes_config_are_explained(key, value):
    with pytest.raises(NanotrainError, match=f"unknown key '{key}': [a-z]"):
        Case("precision", use="qlora", overrides={"precision": {"use": "qlora", key: value}}).recipe()


@pytest.mark.parametrize(
    ("ffn", "tp", "keep", "wanted"),
    [
        (128, 2, (), None),
        (96, 1, (), None),
        (96, 2, (), r"96 columns .* make rows of 96, .* tp = 2 leaves 48 .*; expected 16 or tp = 1 or patt"),
        (96, 2, ("*.down",), None),
        (72, 1, (), r"72 columns .* tp = 1 leaves 72 on a rank; expected patterns of these matrices"),
        (99, 2, (), None),
    ],
)
def test_rows_without_whole_blocks_are_refused_before_ranks_start(ffn, tp, keep, wanted):
    """Those that do not divide at all are refused by what splits them."""
    model = TransformerConfig(layers=1, width=128, heads=4, ffn=ffn, vocab=8, max_length=8)
    recipe = SimpleNamespace(model=SimpleNamespace(config=model))
    config = QLoRAConfig(block_size=32, keep=keep)
    found = [*check_rows(recipe, config, Layout({"dense": View(("dp", "tp"), (1, tp))}))]
    assert [each.key for each in found] == ["precision.block_size"] * (wanted is not None)
    assert wanted is None or re.search(wanted, found[0].message), found


def test_a_run_without_frozen_weights_is_refused_by_name():
    with pytest.raises(
        NanotrainError, match="'qlora' needs frozen_weights; installed components that provide it"
    ):
        Case("precision", use="qlora").recipe()
