"""Weights in and out of Hugging Face's files: logits are those of its own implementations."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_deepseek import PAIRS, SIZES, YARN, logits, our_logits, theirs, tokens
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import tensors_at


@pytest.mark.parametrize(("version", "rope"), PAIRS)
def test_bridge_1467_and_pai_451_logits_are_those_of_transformers_there_and_back(version, rope, tmp_path):
    model = theirs(version, tmp_path / "theirs", rope)
    expected = logits(model)
    assert expected.std() > 0.5
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins(), shard_bytes=40_000)
    convert(tmp_path / "exported", tmp_path / "again", load_plugins())
    for path in ("theirs", "ours"):
        assert (our_logits(tmp_path / path) - expected).abs().max() < 1e-4
    exported, loaded = type(model).from_pretrained(
        tmp_path / "exported", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    assert torch.equal(logits(exported), expected)
    for name in ("model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_config_of_a_release_before_version_5_means_the_same(tmp_path):
    """Released files have rope_theta and rope_scaling, and say more than transformers reads."""
    model = theirs("v3", tmp_path, YARN)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    scaling["type"] = scaling.pop("rope_type")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    path.write_text(json.dumps(config))
    assert (our_logits(tmp_path) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize(("mscale", "all_dim"), [(0.7, 0.0), (0.0, 1.3), (1.0, 0.0), (-0.5, 0.4)])
def test_every_scale_of_yarn_can_be_exported(mscale, all_dim, tmp_path):
    """Transformers reads a pair with a 0 otherwise: it is told the magnitude, too."""
    model = theirs("v3", tmp_path / "theirs", YARN)
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    path = tmp_path / "ours/model.toml"
    table = path.read_text().replace("mscale = 0.7", f"mscale = {mscale}")
    path.write_text(table.replace("mscale_all_dim = 1.3", f"mscale_all_dim = {all_dim}"))
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins())
    convert(tmp_path / "exported", tmp_path / "again", load_plugins())
    assert (tmp_path / "again/model.toml").read_bytes() == path.read_bytes()
    expected = our_logits(tmp_path / "ours")
    assert (expected - logits(model)).abs().max() > 1e-2
    exported = type(model).from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert (logits(exported) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("scales", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale_all_dim": 1.3}])
def test_an_attention_factor_comes_before_the_scales(scales, tmp_path):
    plain = {key: value for key, value in YARN.items() if "mscale" not in key}
    model = theirs("v3", tmp_path, {**plain, **scales, "attention_factor": 0.6})
    assert (our_logits(tmp_path) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize("rope", [None, YARN], ids=["rope", "yarn"])
def test_softmax_weights_that_are_divided_by_their_sum_are_exported_as_mistral_4(rope, tmp_path):
    model = theirs("v2-lite", tmp_path / "theirs", rope)
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    path = tmp_path / "ours/model.toml"
    path.write_text(path.read_text().replace("normalize_weights = false", "normalize_weights = true"))
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins())
    expected = our_logits(tmp_path / "ours")
    assert (expected - logits(model)).abs().max() > 1e-2
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["architectures"] == ["Mistral4ForCausalLM"]
    exported = transformers.Mistral4ForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager"
    )
    assert (logits(exported) - expected).abs().max() < 1e-4


RECIPE = """
extends = "ours/model.toml"
run = { steps = 1, device = "cpu", weights = "theirs" }
batch = { sequences = 2, microbatch = 2, length = 24 }
evaluation = { sequences = 0 }
optimizer = { use = "sgd", lr = 0.1 }
data = { use = "synthetic", vocab = 64 }
"""


@pytest.mark.parametrize(
    "version",
    [
        "v3-halves",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("v3-no-shared-experts", "mistral")),
    ],
)
def test_what_a_run_makes_of_it_is_what_transformers_computes(version, tmp_path):
    model = theirs(version, tmp_path / "theirs", YARN)
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('"theirs"', f'"{tmp_path / "theirs"}"'))
    RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / "run").fit()
    convert(tmp_path / "run", tmp_path / "exported", load_plugins())
    before, after = tensors_at(tmp_path / "ours"), tensors_at(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "router.bias" not in name)
    exported = type(model).from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert (our_logits(tmp_path / "run") - logits(exported)).abs().max() < 1e-4


@pytest.mark.parametrize(("version", "rope"), PAIRS[:9])
def test_an_export_means_the_same_to_readers_of_the_released_config(version, rope, tmp_path):
    """Without ``rope_scaling`` the released code, and transformers before version 5, turn without YaRN."""
    model = theirs(version, tmp_path / "theirs", rope)
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "exported", load_plugins())
    path = tmp_path / "exported/config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    if rope:
        assert config["rope_scaling"].pop("rope_type") == config["rope_scaling"]["type"] == "yarn"
    path.write_text(json.dumps(config))
    exported = type(model).from_pretrained(tmp_path / "exported", attn_implementation="eager")
    assert torch.equal(logits(exported), logits(model))


def test_a_router_s_bias_is_not_rounded_with_the_weights(tmp_path):
    """By its steps of 0.001 experts are chosen; transformers keeps it in float32, too."""
    model = theirs("v3", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins(), dtype=torch.bfloat16)
    convert(tmp_path / "ours", tmp_path / "back", load_plugins(), dtype=torch.bfloat16)
    before, ours = tensors_at(tmp_path / "theirs"), tensors_at(tmp_path / "ours")
    biases = [name for name in ours if name.endswith("router.bias")]
    assert len(biases) == 2
    for name in ours:
        assert torch.equal(ours[name], before[name] if name in biases else before[name].bfloat16()), name
    for name, tensor in load_file(tmp_path / "back/model.safetensors").items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == wanted, name
    assert type(model).from_pretrained(tmp_path / "back", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
def test_modules_for_further_tokens_follow_the_last_layer(order, tmp_path):
    """The reference for their names and columns is written out by hand."""
    width = SIZES["hidden_size"]
    theirs("v3", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "plain", load_plugins())
    own = tmp_path / "ours"
    shutil.copytree(tmp_path / "plain", own)
    table = (own / "model.toml").read_text().replace("mtp = 0", f'mtp = 1\nmtp_input = "{order}"')
    table = table.replace('mtp_input = "hidden_first"\nnorm', "norm")
    (own / "model.toml").write_text(table)
    weights = load_file(own / "model.safetensors")
    block = {name: t for name, t in weights.items() if name.startswith("layers.2.")}
    joined = torch.randn(width, 2 * width)
    weights |= {name.replace("layers.2.", "mtp.0.block."): t + 1 for name, t in block.items()}
    weights |= {f"mtp.0.{name}.weight": torch.rand(width) for name in ("hidden_norm", "embed_norm", "norm")}
    save_file(weights | {"mtp.0.proj.weight": joined}, own / "model.safetensors")

    convert(own, tmp_path / "exported", load_plugins())
    written = load_file(tmp_path / "exported/model.safetensors")
    swapped = torch.cat((joined[:, width:], joined[:, :width]), dim=1)
    assert torch.equal(
        written["model.layers.3.eh_proj.weight"], swapped if order == "hidden_first" else joined
    )
    for there, here in {"hnorm": "hidden_norm", "enorm": "embed_norm", "shared_head.norm": "norm"}.items():
        assert torch.equal(written[f"model.layers.3.{there}.weight"], weights[f"mtp.0.{here}.weight"])
    expert = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert torch.equal(written[expert], weights["mtp.0.block.moe.experts.up"][5])

    found = tensors_at(tmp_path / "exported")  # read as the released weights are: the embedding comes first
    assert torch.equal(found["mtp.0.proj.weight"], swapped if order == "hidden_first" else joined)
    copies = {
        "model.layers.3.embed_tokens.weight": written["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": written["lm_head.weight"].clone(),
    }
    save_file({**written, **copies}, tmp_path / "exported/model.safetensors")
    assert tensors_at(tmp_path / "exported").keys() == found.keys() == weights.keys() | {"mtp.0.proj.weight"}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_loss_of_modules_for_further_tokens_is_that_of_transformers(depth, tmp_path, monkeypatch):
    """They take hidden states after the norm, of the model and of the module before."""
    model = theirs("v3", tmp_path)
    path, width, generator = tmp_path / "model.safetensors", SIZES["hidden_size"], torch.Generator()
    weights = load_file(path)
    last = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.2.")}
    for layer in range(3, 3 + depth):
        for name, tensor in last.items():
            order = torch.randperm(len(tensor), generator=generator)
            weights[name.replace("layers.2.", f"layers.{layer}.")] = tensor[order].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.rand(width, generator=generator) + 0.5
        joined = torch.randn(width, 2 * width, generator=generator)
        weights[f"model.layers.{layer}.eh_proj.weight"] = 0.2 * joined
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": depth}))
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34].*"])
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, expected = tokens(), 0.0
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        for k, layer in enumerate(MtpModel.from_pretrained(model).layers, start=1):
            embedded = model.model.embed_tokens(ids[:, k:])
            length = embedded.shape[1]
            places = torch.arange(length)[None].expand(len(ids), -1)
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            turn = model.model.rotary_emb(embedded, position_ids=places)
            hidden = layer(embedded, hidden[:, :length], turn, mask, places, None)
            predicted = model.lm_head(hidden[:, :-1]).flatten(0, 1)
            expected += F.cross_entropy(predicted, ids[:, k + 1 :].flatten(), reduction="sum").item()

        opened = open_weights(tmp_path, load_plugins())
        chosen = load_plugins().build(opened.selection)
        part = chosen.build(Part.whole(chosen.layers)).to_empty(device="cpu").train()
        part.load_state_dict(tensors_at(tmp_path), strict=True)
        loss = part(ids, Batch(ids, F.pad(ids[:, 1:], (0, 1), value=IGNORE))).losses["mtp"].item()
    assert loss == pytest.approx(expected, rel=1e-5)
