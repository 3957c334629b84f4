"""Weights as DeepSeek released them, in FP8 with a scale for each block."""

import json
import shutil

import pytest
import torch
import transformers
from hf_deepseek import SIZES, logits, our_logits, theirs
from safetensors.torch import load_file, save_file

from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import tensors_at

BLOCK = 16
RELEASED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
NARROW = ("_proj.weight", "_mqa.weight")


def released(folder):
    """Store the matrices of a folder as DeepSeek-V3's were released; return what they stand for, in bfloat16.

    Written out block by block: no size here is a multiple of 16 but the width.
    """
    weights, meant = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        if not name.endswith(NARROW):
            continue
        codes, value = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty_like(tensor)
        scales = torch.empty([-(-size // BLOCK) for size in tensor.shape])
        for row, column in [(i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])]:
            at = tuple(slice(i * BLOCK, (i + 1) * BLOCK) for i in (row, column))
            scale = tensor[at].abs().max() / 448
            codes[at] = (tensor[at] / scale).to(torch.float8_e4m3fn)
            value[at] = codes[at].float() * scale
            scales[row, column] = scale
        weights |= {name: codes, name + "_scale_inv": scales}
        meant[name] = value.bfloat16()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": RELEASED}))
    return meant


@pytest.mark.parametrize("version", ["v3", "v3-no-q-latent-tied"])
def test_weights_in_fp8_as_they_were_released_are_read_as_bfloat16(version, tmp_path):
    theirs(version, tmp_path / "meant")
    shutil.copytree(tmp_path / "meant", tmp_path / "theirs")
    meant = released(tmp_path / "theirs")
    assert len(meant) > 50
    save_file(
        {**load_file(tmp_path / "meant/model.safetensors"), **meant}, tmp_path / "meant/model.safetensors"
    )
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "meant", **options).eval()
    assert (our_logits(tmp_path / "theirs") - logits(model)).abs().max() < 1e-4
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "wide", load_plugins())
    wide = load_file(tmp_path / "wide/model.safetensors")
    for name, tensor in meant.items():
        assert torch.equal(wide[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "wide/config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_scales_may_be_narrower_than_float32(dtype, tmp_path):
    """DeepSeek-V3.1's are powers of two, which each of these stores exactly."""
    theirs("v3", tmp_path)
    released(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    weights = load_file(path)
    weights[name + "_scale_inv"] = torch.exp2(weights[name + "_scale_inv"].log2().round())
    save_file(weights, path)
    expected = tensors_at(tmp_path)["layers.0.attn.o.weight"]
    save_file({**weights, name + "_scale_inv": weights[name + "_scale_inv"].to(dtype)}, path)
    assert torch.equal(tensors_at(tmp_path)["layers.0.attn.o.weight"], expected)


def test_a_rank_reads_its_block_of_released_weights_where_it_cuts_through_theirs(tmp_path):
    theirs("v3", tmp_path)
    released(tmp_path)
    reader, full = open_weights(tmp_path, load_plugins()).reader, tensors_at(tmp_path)
    for name, tensor in full.items():
        index = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in tensor.shape)
        assert torch.equal(reader.read(name, index), tensor[index]), name


def test_experts_of_several_dtypes_are_not_rounded_to_that_of_one(tmp_path):
    theirs("v3", tmp_path / "theirs")
    path, name = tmp_path / "theirs/model.safetensors", "model.layers.1.mlp.experts.{}.up_proj.weight"
    weights = load_file(path)
    last = SIZES["n_routed_experts"] - 1
    weights |= {
        name.format(0): weights[name.format(0)].half(),
        name.format(last): weights[name.format(last)].bfloat16(),
    }
    save_file(weights, path)
    convert(tmp_path / "theirs", tmp_path / "back", load_plugins(), form="huggingface")
    for key, tensor in load_file(tmp_path / "back/model.safetensors").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[key].float()), key


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w, scale: w.pop(scale), "have shape None, expected (2, 3)"),
        (lambda w, scale: w.update({scale: w[scale][:1].clone()}), "have shape (1, 3), expected (2, 3)"),
        (
            lambda w, scale: w.update({"strange_scale_inv": w[scale].clone()}),
            "it has a tensor strange_scale_inv",
        ),
        (
            lambda w, scale: w.update({scale: (w[scale].log2() + 127).to(torch.uint8)}),
            "up_proj.weight_scale_inv has scales stored as U8; only F32, BF16, F16, F8_E8M0 can be read",
        ),
    ],
    ids=["missing", "other-shape", "of-nothing", "exponents"],
)
def test_released_weights_whose_scales_do_not_fit_are_refused(change, text, tmp_path):
    theirs("v3", tmp_path)
    released(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(NanotrainError) as refused:
        open_weights(tmp_path, load_plugins())
    assert text in str(refused.value)
