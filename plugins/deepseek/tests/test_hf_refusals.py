"""What Hugging Face's files cannot say, or transformers cannot read, is refused by name."""

import json

import pytest
from hf_deepseek import theirs
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.hf_config import names
from nanotrain_deepseek.samples import SIZES

from nanotrain_core.cli import main
from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized (fp8); only fp8 in e4m3 with"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; only 1e-06"),
        ({"n_shared_experts": 0}, "shared_experts.down_proj.weight, which the model has no place for"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"num_local_experts": 4}, "num_local_experts is 4; only 8"),
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
    assert text in refusal(tmp_path, changes)


def test_a_mistral_4_whose_heads_have_another_size_is_refused(tmp_path):
    """Its class rotates by ``head_dim``, the size of its queries unless a file says otherwise."""
    theirs("mistral", tmp_path)
    size = json.loads((tmp_path / "config.json").read_text())["head_dim"]
    assert f"head_dim is 6; only {size} can be represented" in refusal(tmp_path, {"head_dim": 6})


def refusal(folder, changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(NanotrainError) as refused:
        open_weights(folder, load_plugins())
    return str(refused.value)


def test_a_model_without_experts_that_would_normalize_their_weights_is_read_back():
    """Its V2, in which it is written, has no such option: without experts there is nothing to normalize."""
    config = DeepSeekConfig(**SIZES, dense_layers=3, score="softmax", normalize_weights=True)
    written = names.config(config)
    assert (written["model_type"], written["norm_topk_prob"]) == ("deepseek_v2", False)
    assert not names.table(written, ())["normalize_weights"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "normalize_weights = false",
            "normalize_weights = true",
            "its V2 does not divide weights by their sum",
        ),
        (
            "normalize_weights = false",
            "normalize_weights = true",
            "takes groups by their best two experts, not one; normalize_weights = true with group_limit = 2",
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
