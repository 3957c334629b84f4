"""``nanotrain sample`` on ranks that it starts, and a folder of transformers against its ``generate``."""

import json

import pytest
import torch
from command import nanotrain

from nanotrain_core.cli import main
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

WORDS = ("--prompt", "one two", "--prompt", "t", "--tokens", "10", "--temperature", "0.9", "--json")


def sampled(done):
    assert done.code == 0, done.err
    return [(text["prompt"], text["tokens"]) for text in json.loads(done.out)["texts"]]


def test_ranks_write_what_one_process_does(tmp_path):
    (tmp_path / "text.txt").write_text("one two three " * 40)
    data = {"use": "text", "paths": [str(tmp_path / "text.txt")], "suffixes": [".txt"]}
    case = Case("checkpoint", use="simple", overrides={"model": {"vocab": 259}, "data": data})
    make_engine(case, {"run": {"steps": 1}}, folder=tmp_path / "run").fit()
    one = nanotrain("sample", "run", *WORDS, cwd=tmp_path)
    four = nanotrain("sample", "run", *WORDS, "--degree", "tp=2", "--degree", "pp=2", cwd=tmp_path)
    assert sampled(four) == sampled(one)
    assert [prompt for prompt, _ in sampled(one)] == ["one two", "t"]


@pytest.mark.full
def test_ranks_score_what_one_process_does(tmp_path):
    (tmp_path / "text.txt").write_text("one two three " * 40)
    data = {"use": "text", "paths": [str(tmp_path / "text.txt")], "suffixes": [".txt"]}
    case = Case("checkpoint", use="simple", overrides={"model": {"vocab": 259}, "data": data})
    make_engine(case, {"run": {"steps": 1}}, folder=tmp_path / "run").fit()
    words = ("eval", "run", "--text", "text.txt", "--stride", "7", "--json")
    ((one,), (four,)) = (
        json.loads(done.out)["texts"]
        for done in (
            nanotrain(*words, cwd=tmp_path),
            nanotrain(*words, "--degree", "tp=2", "--degree", "pp=2", cwd=tmp_path),
        )
    )
    assert four == {
        **one,
        **{name: pytest.approx(one[name], rel=1e-9) for name in ("loss", "perplexity", "bits_per_byte")},
    }


def saved_by_transformers(kind, folder):
    """Save a small random model in ``folder``, and return it."""
    if kind == "deepseek-v3":
        return pytest.importorskip("hf_deepseek").theirs("v3", folder)
    models = pytest.importorskip("hf_models")
    stretched = {
        **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 12},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    llama = {"num_key_value_heads": 2, "rope_parameters": stretched}
    model = models.llama(**llama) if kind == "llama" else models.gpt2()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "deepseek-v3"])
def test_a_folder_of_transformers_is_continued_as_transformers_does(kind, tmp_path, capsys):
    """Greedily: with learned positions; grouped queries and stretched RoPE; latents, and experts."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = saved_by_transformers(kind, tmp_path)
    words = {f"w{number}": number for number in range(theirs.config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ("--prompt", "w3 w14 w15", "--tokens", "16", "--temperature", "0", "--json")
    assert main(["sample", str(tmp_path), *words, "--set", "run.device=cpu"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    prompt = torch.tensor([[3, 14, 15]])
    expected = theirs.generate(prompt, max_new_tokens=16, do_sample=False)
    assert text["tokens"] == expected[0, 3:].tolist()
    assert text["text"].split() == [f"w{token}" for token in text["tokens"]]
