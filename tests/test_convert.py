"""Weights in and out of Hugging Face's files, against transformers' own classes."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import gpt2, llama, logits, mistral, our_logits, qwen2, qwen3
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from nanotrain_core.cli import main
from nanotrain_core.hf.convert import convert
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import tensors_at

#: Llama 3.1's, for an original length at which some of 8 pairs keep their frequency and some are slowed down.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

#: Files without which a tokenizer of transformers would have other tokens, or other templates.
TOKENIZER = ("tokenizer.json", "added_tokens.json", "additional_chat_templates/tool_use.jinja")

MODELS = {
    "llama": llama,
    "llama-grouped": lambda: llama(num_key_value_heads=2),
    "llama-one-key-head": lambda: llama(num_key_value_heads=1, rope_theta=500.0),
    "llama-scaled": lambda: llama(rope_parameters=SCALED, head_dim=16),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-wide-heads": lambda: llama(head_dim=16, num_key_value_heads=2),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "qwen2": qwen2,
    "qwen2-tied": lambda: qwen2(tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    "qwen3": qwen3,
    "qwen3-biases": lambda: qwen3(attention_bias=True, rms_norm_eps=1e-3),
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2-narrow": lambda: gpt2(n_inner=40, layer_norm_epsilon=1e-3),
}


@pytest.fixture(params=MODELS)
def theirs(request, tmp_path):
    """A random model of transformers, saved in ``theirs``."""
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_logits_are_those_of_transformers(theirs, tmp_path):
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    expected = logits(theirs)
    assert expected.std() > 0.1  # a model that says something
    for path in ("theirs", "ours"):
        torch.testing.assert_close(our_logits(tmp_path / path), expected, atol=1e-4, rtol=0)


def test_transformers_loads_what_is_exported_bit_by_bit(theirs, tmp_path):
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "again", load_plugins(), shard_bytes=20_000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert {**again.state_dict()}.keys() == {**theirs.state_dict()}.keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(logits(again), logits(theirs))


def test_export_and_import_give_back_the_same_bytes(theirs, tmp_path):
    registry = load_plugins()
    convert(tmp_path / "theirs", tmp_path / "ours", registry)
    convert(tmp_path / "ours", tmp_path / "there", registry, shard_bytes=20_000)
    convert(tmp_path / "there", tmp_path / "back", registry)
    for name in ("model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_a_mistral_is_exported_as_the_llama_that_it_is(tmp_path):
    model = mistral(sliding_window=None)
    model.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "back", load_plugins())
    again = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits(again), logits(model))
    torch.testing.assert_close(our_logits(tmp_path / "ours"), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", [llama, mistral, qwen2, qwen3])
def test_a_length_that_a_config_leaves_out_is_that_of_its_class(model, tmp_path):
    """Frequencies of YaRN were those of a Llama's 2,048 for all of them, without a word."""
    window = {"sliding_window": None} if model is mistral else {}
    saved = model(**window)
    saved.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text())
    for key in ("max_position_embeddings", "rope_parameters"):
        del config[key]
    config |= {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    path.write_text(json.dumps(config))
    expected = logits(type(saved).from_pretrained(tmp_path / "theirs"))
    torch.testing.assert_close(our_logits(tmp_path / "theirs"), expected, atol=1e-5, rtol=0)


def test_a_scaled_rope_is_written_for_older_versions_too(tmp_path):
    """They would compute other angles, without a word, from a config.json of newer ones."""
    llama(rope_parameters=SCALED).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "back", load_plugins())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["rope_parameters"] == SCALED
    old = dict(config["rope_scaling"])
    assert old.pop("type") == "llama3"
    assert {**old, "rope_theta": config["rope_theta"]} == SCALED
    del config["rope_parameters"]
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    ours, theirs = our_logits(tmp_path / "ours"), our_logits(tmp_path / "theirs")
    assert torch.equal(ours, theirs)


def test_a_model_saved_without_its_head_has_names_without_prefix(tmp_path):
    model = gpt2()
    model.transformer.save_pretrained(tmp_path / "headless")
    torch.testing.assert_close(our_logits(tmp_path / "headless"), logits(model), atol=1e-4, rtol=0)


def test_weights_are_rounded_if_asked_for(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins(), dtype=torch.bfloat16)
    for name, tensor in tensors_at(tmp_path / "ours").items():
        assert torch.equal(tensor, tensors_at(tmp_path / "theirs")[name].bfloat16()), name
    convert(tmp_path / "ours", tmp_path / "back", load_plugins())
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert type(model).from_pretrained(tmp_path / "back").dtype == torch.bfloat16


def test_parameters_of_several_dtypes_in_one_tensor_are_not_rounded(tmp_path):
    """GPT-2 stores queries, keys and values as one tensor."""
    gpt2().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    path, name = tmp_path / "ours/model.safetensors", "layers.0.attn.q.weight"
    weights = load_file(path)
    save_file({**weights, name: weights[name].bfloat16()}, path)
    convert(tmp_path / "ours", tmp_path / "back", load_plugins())
    for key, tensor in tensors_at(tmp_path / "back").items():
        assert torch.equal(tensor, weights[key].bfloat16().float() if key == name else weights[key]), key


def test_the_command_converts_both_ways_and_takes_the_tokenizer_along(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = llama()
    model.save_pretrained("theirs")
    (tmp_path / "theirs/additional_chat_templates").mkdir()
    for name in TOKENIZER:
        (tmp_path / "theirs" / name).write_text("{}")
    assert main(["convert", "theirs", "ours"]) == 0
    said = capsys.readouterr().out
    assert f"ours: {model.num_parameters():,} parameters of model 'transformer', in 1 file" in said
    assert 'extends = "ours/model.toml"' in said
    assert main(["convert", "ours", "back", "--shard-gb", "2e-5"]) == 0
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    found = {str(path.relative_to("back")) for path in Path("back").rglob("*") if path.is_file()}
    assert found == {
        *files,
        *TOKENIZER,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }


@pytest.mark.parametrize("own", [False, True])
def test_generation_ends_where_it_did_before(own, tmp_path):
    """Transformers takes the tokens of config.json if there is no generation_config.json."""
    model = llama(bos_token_id=1, eos_token_id=[2, 5])
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/generation_config.json"
    file.write_text('{"eos_token_id": 7}') if own else file.unlink()
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    convert(tmp_path / "ours", tmp_path / "back", load_plugins())
    found = type(model).from_pretrained(tmp_path / "back").generation_config
    assert (found.bos_token_id, found.eos_token_id) == ((None, 7) if own else (1, [2, 5]))


def test_no_file_grows_past_the_limit_unless_for_one_tensor(tmp_path):
    llama().save_pretrained(tmp_path / "theirs")
    limit = 10_000
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins(), shard_bytes=limit)
    for path in (tmp_path / "ours").glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1
