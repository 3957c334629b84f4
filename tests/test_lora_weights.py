"""Adapters of a run in Hugging Face's formats: merged into its weights, or a folder that ``peft`` loads."""

import json

import pytest
import torch
from command import nanotrain
from compositions import MODELS, VOCAB
from doc_blocks import ROOT, blocks, commands
from safetensors.torch import load_file
from test_own_conversations import write_model
from transformers import AutoModelForCausalLM

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

GPT2 = {
    "use": "transformer",
    "width": 24,
    "heads": 4,
    "vocab": VOCAB,
    "positions": "learned",
    "max_length": 32,
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "tied": True,
    "init_std": 0.3,
}
LORA = {"use": "lora", "rank": 3, "alpha": 12.0}


def run(model, folder, *wrappers, **changes):
    overrides = {
        "model": {**model, "layers": 2},
        "data": {"vocab": VOCAB},
        "parallel": [*wrappers],
        "optimizer": {"use": "adamw", "lr": 0.05},
        "precision": {"use": "fp32"},
        **changes,
    }
    case = Case("topology", use="grid", overrides=overrides)
    make_engine(case, {"run": {"steps": 3}}, folder=folder).fit()


def convert(*words):
    assert main(["convert", *map(str, words)]) == 0


def folders(tmp_path, model, config):
    """Return the folders of the base, of the adapter, and of the merged model, in Hugging Face's formats."""
    run(model, tmp_path / "adapted", {**LORA, **config})
    run(model, tmp_path / "plain", optimizer={"use": "sgd", "lr": 1e-30})  # stays as it is
    found = [tmp_path / name for name in ("base", "adapter", "merged")]
    convert(tmp_path / "plain", found[0])
    convert(tmp_path / "adapted", found[1], "--to", "peft")
    convert(tmp_path / "adapted", found[2])
    return found


CASES = {
    "llama": (MODELS["transformer"], {}),
    "gpt2": (GPT2, {}),  # transformers has one matrix for q, k and v
    "gpt2, some": (GPT2, {"targets": ["q", "layers.1.attn.v", "down"], "rslora": True}),
    "moe": (MODELS["moe"], {"targets": ["attn"]}),
    "deepseek": ({**MODELS["deepseek_v3"], "bias_update_rate": 0.0}, {"targets": ["attn"]}),
}


@pytest.mark.full_cases("llama", "gpt2, some", "moe", "deepseek")
@pytest.mark.parametrize("name", CASES)
def test_the_base_with_the_adapter_is_the_merged_model(tmp_path, name):
    base, adapter, merged = folders(tmp_path, *CASES[name])
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    assert before.keys() == after.keys()
    changed = {key.partition("base_model.model.")[2].partition(".lora_")[0] for key in tensors}
    for key, weight in before.items():
        module = key.removesuffix(".weight")
        wanted = weight
        if module in changed:
            a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            rank = config["rank_pattern"].get(module, config["r"])
            alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
            assert a.shape[0] == b.shape[1] == rank
            delta = alpha / (rank**0.5 if config["use_rslora"] else rank) * b @ a
            wanted = weight + (delta.T if config["fan_in_fan_out"] else delta)
            assert delta.abs().max() > 1e-3
        torch.testing.assert_close(after[key], wanted, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_the_adapter(tmp_path, name):
    peft = pytest.importorskip("peft")
    base, adapter, merged = folders(tmp_path, *CASES[name])
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    model, whole = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (base, merged)
    )
    with torch.no_grad():
        plain = model(tokens).logits
        adapted = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
        found, wanted = adapted(tokens).logits, whole(tokens).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (plain - wanted).abs().max() > 0.1


def test_what_peft_would_drop_is_not_written_for_it(tmp_path, capsys):
    """Its own loader takes each gate_proj of such a model for an expert's."""
    run(MODELS["moe"], tmp_path / "run", LORA)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert "peft takes an adapter of model.layers.0.mlp.gate_proj for" in capsys.readouterr().err
    convert(tmp_path / "run", tmp_path / "merged")


def test_what_has_no_adapter_is_not_written_as_one(tmp_path, capsys):
    run(MODELS["transformer"], tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert (
        "--to peft is of what 'lora' adds to a model, and no run with it has saved these"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_adapters_alone_are_not_taken_for_weights(tmp_path, capsys):
    """They were refused as a folder that holds nothing to read, or no file of tensors."""
    run(MODELS["transformer"], tmp_path / "run", {**LORA, "targets": ["q"]})
    convert(tmp_path / "run", tmp_path / "adapters", "--to", "peft")
    for also in ("README.md", "config.json"):
        (tmp_path / "adapters" / also).write_text('{"model_type": "llama"}')
        assert main(["convert", str(tmp_path / "adapters"), str(tmp_path / "out")]) == Exit.USER
        assert "adapters holds PEFT adapters (adapter_config.json) without their" in capsys.readouterr().err


@pytest.mark.full
def test_the_page_leads_from_convert_to_an_adapter_on_tp_2_dp_2(tmp_path):
    page = [block for block in blocks() if block.page == ROOT / "docs/weights.md"]
    (at,) = (number for number, block in enumerate(page) if "--to peft" in block.text)
    write_model(tmp_path / "SmolLM2-1.7B")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("Once upon a time there was a king. " * 400)
    (tmp_path / "lora.toml").write_text(page[at + 1].text)
    small = ["run.steps=20", "run.device=cpu", "batch.length=32", "optimizer.lr=0.01", "precision.use=fp32"]
    changes = {
        "run": [word for setting in small for word in ("--set", setting)],
        "sample": ["--temperature", "0", "--tokens", "8", "--set", "precision.use=fp32"],
    }
    for _, *words in commands(page[at]):
        done = nanotrain(*words, *changes.get(words[0], []), cwd=tmp_path)
        assert done.code == Exit.DONE, f"{words}: {done.err}"
    rows = map(json.loads, (tmp_path / "runs/lora/metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    assert losses[-1] < losses[0] / 2
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("SmolLM2-1.7B", "merged"))
    assert base.keys() == merged.keys()
    changed = {name for name, weight in base.items() if not torch.equal(weight, merged[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert (tmp_path / "adapter/adapter_config.json").is_file()
