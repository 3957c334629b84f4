"""What cannot be read or written is named: weights that do not fit, damaged files, unknown models."""

import json
import os
from functools import partial

import pytest
import torch
from hf_models import gpt2, llama, mistral, qwen2, qwen3
from safetensors.torch import load_file, save_file

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit, NanotrainError, PluginError
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.mapping import HFTensor, ParameterMapping
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.hf.weights import Atlas
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case
from nanotrain_core.testing.case import HARNESS
from nanotrain_core.testing.converted import tensors_at
from nanotrain_core.testing.disaster import end_of_child, kill_at
from nanotrain_core.testing.probe import make_engine

SAVED = "model.safetensors"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    tensors = load_file(folder / SAVED)
    change(tensors)
    save_file(tensors, folder / SAVED)


def refusal(path):
    with pytest.raises(NanotrainError) as refused:
        open_weights(path, load_plugins())
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model_type": "lama"},
            "model_type is 'lama' (did you mean 'llama'?); installed models can represent: ",
        ),
        (
            {"hidden_act": "relu"},
            "model 'transformer' cannot represent it: config.json: hidden_act is 'relu'",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type is 'longrope'; only 'default' or 'llama3' or 'yarn' or 'linear' or 'dynamic' can be",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor of its RoPE is missing; expected a number"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 16}},
            "2048 in max_position_embeddings and 16 in original_max_position_embeddings; leave the",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}},
            "attention_factor of its RoPE is 0 or less",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor of its RoPE is missing; expected a number"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "rope_type is 'default' in rope_parameters and 'llama3' in rope_scaling; leave one of them out",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; expected an integer above 0"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected an integer above 0"),
        ({"is_causal": False}, "config.json: is_causal is False; only True can be represented"),
        ({"num_attention_heads": 5}, "5 heads do not divide width 32"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized (gptq)"),
        ({"intermediate_size": 50}, "mlp.gate_proj.weight has shape (48, 32), expected (50, 32)"),
        ({"num_hidden_layers": 3}, "it has no tensor model.layers.2.input_layernorm.weight, expected with"),
        (
            {"num_hidden_layers": 1},
            "it has a tensor model.layers.1.input_layernorm.weight, which the model has no",
        ),
    ],
)
def test_a_llama_that_cannot_be_read(changes, text, tmp_path):
    llama().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert text in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"activation_function": "gelu"},
            "activation_function is 'gelu'; only 'gelu_new' or 'gelu_pytorch_tanh'",
        ),
        ({"is_causal": False}, "config.json: is_causal is False; only True can be represented"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8; only 4 can be represented"),
        ({"max_position_embeddings": 25}, "max_position_embeddings is 25; only 24 can be represented"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"n_positions": 25}, "wpe.weight has shape (24, 32), expected (25, 32)"),
    ],
)
def test_a_gpt2_that_cannot_be_read(changes, text, tmp_path):
    gpt2().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert text in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model", "changes", "text"),
    [
        (mistral, {"sliding_window": 0}, "sliding_window is 0; expected an integer above 0"),
        (
            qwen2,
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types is 'chunked_attention'; only 'full_attention' or 'sliding_attention' can be",
        ),
        (qwen2, {"layer_types": ["full_attention"]}, "has 1 layers, and num_hidden_layers is 2"),
        (qwen2, {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers is '1'; expected"),
        (
            qwen3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', and use_sliding_window is not true",
        ),
        (
            mistral,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', and sliding_window is null",
        ),
        (qwen3, {"head_dim": 0}, "head_dim is 0; expected an integer above 0"),
    ],
)
def test_a_mistral_or_qwen_that_cannot_be_read(model, changes, text, tmp_path):
    model(**{"sliding_window": None} if model is mistral else {}).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert text in refusal(tmp_path)


def test_a_head_size_that_a_config_leaves_out_is_that_of_its_class(tmp_path):
    qwen3().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "config.json describes 112,288 numbers, and the files hold 25,824" in refusal(tmp_path)


def test_masks_and_frequencies_of_old_files_are_left_out(tmp_path):
    gpt2().save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}))
    assert open_weights(tmp_path, load_plugins()).hf
    change_tensors(tmp_path, lambda t: t.update({"transformer.h.0.attn.scale": torch.ones(1)}))
    assert "it has a tensor transformer.h.0.attn.scale" in refusal(tmp_path)


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    before = tensors_at(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    after = tensors_at(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    change_tensors(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    assert "lm_head.weight, and config.json ties the head to the embedding, which is another" in refusal(
        tmp_path
    )


def test_names_of_a_model_without_its_prefix_are_read_beside_a_head(tmp_path):
    llama().save_pretrained(tmp_path)
    before = tensors_at(tmp_path)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(tmp_path, rename)
    after = tensors_at(tmp_path)
    assert all(before[name].equal(after[name]) for name in before)


def test_files_that_are_not_there_or_damaged(tmp_path):
    llama().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins(), shard_bytes=30_000)
    shard = min((tmp_path / "ours").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert f"{shard} is missing or damaged" in refusal(tmp_path / "ours")
    shard.unlink()
    assert f"{shard} is missing or damaged" in refusal(tmp_path / "ours")
    os.mkfifo(shard)
    assert f"{shard} is missing or damaged: it is no plain file" in refusal(tmp_path / "ours")
    for name in ("config.json", "model.safetensors.index.json"):
        table = tmp_path / "theirs" / name
        table.touch()
        os.truncate(table, 2**32)
        assert f"{table} is damaged" in refusal(tmp_path / "theirs")
        table.unlink()
        (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "theirs" / SAVED).unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path / "theirs")
    (tmp_path / "theirs/config.json").write_text("{")
    assert "config.json is damaged" in refusal(tmp_path / "theirs")
    assert "there is no such file or folder" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("norm.weight"), "it has no tensor norm.weight, expected with shape (32,)"),
        (lambda t: t.update(extra=torch.ones(2)), "it has a tensor extra, which the model has no place for"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), "norm.weight has shape (31,), expected (32,)"),
        (
            lambda t: t.update({"norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            "norm.weight is stored as F8_E4M3; only F64, F32, F16, BF16 can be read",
        ),
    ],
)
def test_a_folder_of_ours_with_other_tensors(change, text, tmp_path):
    llama().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    change_tensors(tmp_path / "ours", change)
    assert text in refusal(tmp_path / "ours")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"rope"', '"learned"', "it is none of these: Llama: positions = 'rope'"),
        ('norm = "rmsnorm"', 'norm = "layernorm"', "it has positions = 'rope', norm = 'layernorm'"),
        (
            "qk_norm = false\nwindow = 0",
            "qk_norm = false\nattention_bias = true\nwindow = 4",
            "Mistral: a Llama without biases, with window",
        ),
        ("layers = 2", 'layers = "2"', "model.layers: expected an integer, got the string '2'"),
        ("layers = 2", "layer = 2", "model.layer: unknown key 'layer' (did you mean 'layers'?)"),
        (
            'use = "transformer"',
            'use = "transfomer"',
            "no model named 'transfomer' (did you mean 'transformer'?)",
        ),
    ],
)
def test_a_model_without_counterpart_is_not_exported(old, new, text, tmp_path, capsys):
    llama().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    table = tmp_path / "ours/model.toml"
    assert old in table.read_text()
    table.write_text(table.read_text().replace(old, new))
    if "learned" in new:
        change_tensors(tmp_path / "ours", lambda t: t.update({"positions.weight": torch.ones(2048, 32)}))
    if "attention_bias" in new:
        biases = {f"layers.{n}.attn.{name}.bias": torch.ones(32) for n in range(2) for name in "qkvo"}
        change_tensors(tmp_path / "ours", lambda t: t.update(biases))
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out")]) == Exit.USER
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_names_no_counterpart_is_written_under_its_own_names(tmp_path, capsys):
    """Its weights are not lost: the refusal says how to get them."""
    case = Case("model", use="routed")
    make_engine(case, {"run": {"steps": 1}}, folder=tmp_path / "run").fit()
    capsys.readouterr()
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "out")]
    words += ["--plugin", HARNESS]
    assert main(words) == Exit.USER
    told = capsys.readouterr().err
    assert told.startswith("nanotrain: model 'routed' has no mapping in transformers; models that have: ")
    assert told.endswith("transformer. Under its own names it can be written: --to nanotrain\n")
    assert not (tmp_path / "out").exists()
    assert main([*words, "--to", "nanotrain"]) == Exit.DONE
    whole = load_file(tmp_path / "run/checkpoints/step-00000001.safetensors")
    exported = load_file(tmp_path / "out" / SAVED)
    assert exported.keys() == {name for name in whole if "/" not in name}
    assert all(torch.equal(exported[name], whole[name]) for name in exported)


def test_a_checkpoint_is_no_kind_of_weights(tmp_path, capsys):
    make_engine(Case("optimizer", use="sgd"), {"run": {"steps": 1}}, folder=tmp_path / "run").fit()
    capsys.readouterr()
    words = [str(tmp_path / "run"), str(tmp_path / "out")]
    for wanted, told in (
        ("huggingface", f"for the weights alone: `nanotrain convert {' '.join(words)} --to huggingface`"),
        ("sharded", "no checkpoint named 'sharded' (did you mean 'sharded_v2'?)"),
    ):
        assert main(["ckpt", "convert", *words, "--to", wanted]) == Exit.USER
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_nothing_half_done_is_left(tmp_path, capsys, monkeypatch):
    llama().save_pretrained(tmp_path / "theirs")
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "theirs")]
    assert main(words) == Exit.USER
    assert "is there already: name a new folder" in capsys.readouterr().err

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanotrain_core.run.files.os.replace", full)
    assert main([*words[:2], str(tmp_path / "ours")]) == Exit.USER
    assert "ours cannot be written: No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.full)])
def test_killed_while_it_is_written_an_export_is_whole_or_not_there(tmp_path, every):
    gpt2(n_positions=8).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").write_text("{}")
    registry = load_plugins()

    def export(folder, number):
        kill_at(number)
        convert(tmp_path / "theirs", folder / "ours", registry)

    def files(folder):
        return {path.name: path.read_bytes() for path in (folder / "ours").iterdir()}

    convert(tmp_path / "theirs", tmp_path / "ours", registry)
    ends = []
    while ends[-1:] != ["done"]:
        ends.append(end_of_child(partial(export, tmp_path / str(len(ends)), every * len(ends) + 1)))
    assert set(ends[:-1]) == {"killed"}
    assert len(ends) > 40 // every
    there = [
        path for path in (tmp_path / str(number) for number in range(len(ends))) if (path / "ours").exists()
    ]
    assert 0 < len(there) < len(ends) // 2
    assert all(files(folder) == files(tmp_path) for folder in there)


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    from recipe_files import write

    from nanotrain_core.engine import RuntimeEngine

    recipe = write(tmp_path)
    engine = RuntimeEngine.from_recipe(recipe, folder=tmp_path / "run")
    engine.fit(steps=1)
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "good")]) == Exit.DONE
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "bad")]) == Exit.USER
    assert "its bytes do not match its SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mappings", "text"),
    [
        ([], "a: it is left out"),
        (
            [ParameterMapping("a", HFTensor("x")), ParameterMapping("b", HFTensor("y"))],
            "b: the model has no such parameter",
        ),
        (
            [ParameterMapping("a", (HFTensor("x"), HFTensor("y")))],
            "Hugging Face names of a: 2 tensors for 4 on axis 0",
        ),
        ([ParameterMapping("a", HFTensor("x", rows=range(3)))], "Hugging Face names of a: 3 rows for 4"),
        ([ParameterMapping("a", HFTensor("x", rows=range(1, 5)))], "the rows of x are not each used once"),
        (
            [ParameterMapping("a", HFTensor("x", columns=(0, 1, 1)))],
            "Hugging Face names of a: columns are no permutation",
        ),
        (
            [ParameterMapping("a", HFTensor("x", columns=range(2)))],
            "Hugging Face names of a: columns are no permutation",
        ),
    ],
)
def test_a_plugin_whose_names_are_wrong_is_told_which(mappings, text):
    with pytest.raises(PluginError, match=text):
        Atlas(mappings, {"a": (4, 3)})


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ((range(3), range(2, 4)), "the columns of x are not each used once: 5 are given"),
        ((range(3), range(3, 6)), "Hugging Face names of b: 3 columns for 2"),
        ((range(3), None), "the rows of x are not each used once"),
    ],
)
def test_parameters_that_share_a_tensor_by_columns_must_use_each_once(columns, text):
    mappings = [
        ParameterMapping(name, HFTensor("x", columns=each)) for name, each in zip("ab", columns, strict=True)
    ]
    with pytest.raises(PluginError, match=text):
        Atlas(mappings, {"a": (4, 3), "b": (4, 2)})
