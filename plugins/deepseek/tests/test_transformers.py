"""Weights in and out of Hugging Face's files: logits are those of its own implementations."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.hf.weights import whole
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.registry.registry import load_plugins

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
V2 = {"norm_topk_prob": False}
MISTRAL = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
#: Its class has no plain RoPE, and scales queries by their position unless told not to.
MISTRAL_ROPE = {
    "rope_type": "linear",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.0,
}
LIMITED = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}


def random_weights(model):
    """Give norms and biases values that show whether they are used; the initialisation leaves them alike."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "e_score_correction_bias" in name:
                tensor.uniform_(-0.3, 0.3)
            elif "gate.weight" in name:
                tensor.normal_(0.0, 0.2)


VERSIONS = {
    "v3": (3, {**V3, "q_lora_rank": 20}),
    "v3-no-q-latent-tied": (3, {**V3, "q_lora_rank": None, "tie_word_embeddings": True}),
    "v2": (2, {**V2, **LIMITED, "q_lora_rank": 20}),
    "v2-lite": (2, {**V2, "topk_method": "greedy", "q_lora_rank": None}),
    "v2-no-shared-experts": (2, {**V2, "topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 0}),
    "v3-no-shared-experts": (3, {**V3, "q_lora_rank": 20, "n_shared_experts": 0}),
    "v3-halves": (3, {**V3, "q_lora_rank": 20, "rope_interleave": False}),
    "v3-halves-no-q-latent": (3, {**V3, "q_lora_rank": None, "rope_interleave": False}),
    "mistral": ("Mistral4", {**MISTRAL, "q_lora_rank": 20}),
    "mistral-halves": ("Mistral4", {**MISTRAL, "q_lora_rank": None, "rope_interleave": False}),
}
#: The first four with both kinds of RoPE, then Mistral 4, and the others with the one that has more to it.
PAIRS = [
    *(
        pytest.param(v, rope, id=f"{v}-{'yarn' if rope else 'plain'}")
        for v in list(VERSIONS)[:4]
        for rope in (None, YARN)
    ),
    *(pytest.param(v, YARN, id=f"{v}-yarn") for v in list(VERSIONS)[:3:-1]),
    *(pytest.param(v, None, id=f"{v}-plain", marks=pytest.mark.full) for v in list(VERSIONS)[4:]),
]


def theirs(version, folder, rope=None):
    """Save a random model in ``folder`` and return it."""
    number, options = VERSIONS[version]
    name = number if isinstance(number, str) else f"DeepseekV{number}"
    config_class, model_class = (getattr(transformers, name + what) for what in ("Config", "ForCausalLM"))
    if name == "Mistral4":
        rope = MISTRAL_ROPE | (rope or {})
    rope = dict(rope or {"rope_type": "default", "rope_theta": 10000.0})
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **options}, rope_parameters=rope)).eval()
    random_weights(model)
    model.save_pretrained(folder)
    return model


def tensors(path):
    """Return the weights at ``path`` by our names."""
    reader = open_weights(path, load_plugins()).reader
    return {name: reader.read(name, whole(shape)) for name, shape in reader.shapes.items()}


def tokens():
    return torch.randint(SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def our_logits(path):
    registry = load_plugins()
    model = registry.build(open_weights(path, registry).selection)
    part = model.build(Part.whole(model.layers)).to_empty(device="cpu")
    part.load_state_dict(tensors(path), strict=True)
    return part.eval()(tokens(), Batch(tokens())).value


@torch.no_grad()
def logits(model):
    return model(tokens()).logits


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
    path.write_text(path.read_text().replace("normalise_weights = false", "normalise_weights = true"))
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


@pytest.mark.parametrize("version", ["v3-halves", "v3-no-shared-experts", "mistral"])
def test_what_a_run_makes_of_it_is_what_transformers_computes(version, tmp_path):
    model = theirs(version, tmp_path / "theirs", YARN)
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('"theirs"', f'"{tmp_path / "theirs"}"'))
    RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / "run").fit()
    convert(tmp_path / "run", tmp_path / "exported", load_plugins())
    before, after = tensors(tmp_path / "ours"), tensors(tmp_path / "exported")
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
    before, ours = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
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

    found = tensors(tmp_path / "exported")  # read as the released weights are: the embedding comes first
    assert torch.equal(found["mtp.0.proj.weight"], swapped if order == "hidden_first" else joined)
    copies = {
        "model.layers.3.embed_tokens.weight": written["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": written["lm_head.weight"].clone(),
    }
    save_file({**written, **copies}, tmp_path / "exported/model.safetensors")
    assert tensors(tmp_path / "exported").keys() == found.keys() == weights.keys() | {"mtp.0.proj.weight"}


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


def test_a_rank_reads_its_block_of_released_weights_where_it_cuts_through_theirs(tmp_path):
    theirs("v3", tmp_path)
    released(tmp_path)
    reader, full = open_weights(tmp_path, load_plugins()).reader, tensors(tmp_path)
    for name, tensor in full.items():
        index = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in tensor.shape)
        assert torch.equal(reader.read(name, index), tensor[index]), name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w, scale: w.pop(scale), "have shape None, expected (2, 3)"),
        (lambda w, scale: w.update({scale: w[scale][:1].clone()}), "have shape (1, 3), expected (2, 3)"),
        (
            lambda w, scale: w.update({"strange_scale_inv": w[scale].clone()}),
            "it has a tensor strange_scale_inv",
        ),
    ],
    ids=["missing", "other-shape", "of-nothing"],
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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized (fp8); only fp8 in e4m3 with"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; only 1e-06"),
        ({"n_shared_experts": 0}, "shared_experts.down_proj.weight, which the model has no place for"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; only 4"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type is 'linear'; only 'default'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            "rope_type is 'default' in rope_parameters and 'yarn' in rope_scaling; leave one of them out",
        ),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"kv_lora_rank": 17}, "kv_a_layernorm.weight has shape (16,), expected (17,)"),
        ({"num_hidden_layers": 4}, "it has no tensor model.layers.3.input_layernorm.weight"),
        ({"model_type": "deepseek_v5"}, "model_type is 'deepseek_v5' (did you mean 'deepseek_v"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(changes, text, tmp_path):
    theirs("v3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(NanotrainError) as refused:
        open_weights(tmp_path, load_plugins())
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "normalise_weights = false",
            "normalise_weights = true",
            "its V2 does not divide weights by their sum",
        ),
        (
            "normalise_weights = false",
            "normalise_weights = true",
            "takes groups by their best two experts, not one; normalise_weights = true with group_limit = 2",
        ),
        ("norm_eps = 1e-06", "norm_eps = 1e-05", "its norms of latents always add 1e-06; norm_eps = 1e-05"),
    ],
)
def test_a_model_that_transformers_lacks_is_not_exported(old, new, text, tmp_path, capsys):
    theirs("v2", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    table = (tmp_path / "ours/model.toml").read_text()
    assert old in table
    (tmp_path / "ours/model.toml").write_text(table.replace(old, new))
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "exported")]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()
