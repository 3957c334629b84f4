"""``nanotrain sample``: texts of a run, a checkpoint and weights alone, and what is refused."""

import io
import json
import os
from pathlib import Path

import pytest
import torch

from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

NO_CACHE = str(Path(__file__).with_name("no_cache.py"))
MODEL = {
    **{"use": "transformer", "layers": 2, "width": 32, "heads": 4, "init_std": 0.2},
    **{"vocab": 300, "positions": "learned", "max_length": 48},
}


def train(folder, **model):
    """Train a step on text, and return the folder and the run."""
    (folder / "text.txt").write_text("one two three " * 40)
    data = {"use": "text", "paths": [str(folder / "text.txt")], "suffixes": [".txt"]}
    case = Case(
        "checkpoint",
        use="simple",
        overrides={"model": {**MODEL, **model}, "data": data, "batch": {"sequences": 2}},
        plugins=(NO_CACHE,),
    )
    engine = make_engine(case, {"run": {"steps": 1}}, folder=folder)
    engine.fit()
    return folder, engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def call(capsys, *words):
    code = main(["sample", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def texts(capsys, *words):
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)["texts"]


@torch.no_grad()
def likeliest(engine, prompt, count):
    """Continue by the definition: after the whole text, the likeliest byte."""
    (part,) = engine.run.stages.values()
    tokens = list(prompt.encode())
    for _ in range(count):
        whole = torch.tensor([tokens])
        tokens.append(int(part.eval()(whole, Batch(whole)).value[0, -1, :256].argmax()))
    return tokens[len(prompt.encode()) :]


def test_the_likeliest_tokens_are_those_of_the_whole_text(trained, capsys):
    folder, engine = trained
    (text,) = texts(capsys, folder, "--prompt", "one two", "--tokens", 12, "--temperature", 0)
    assert text["tokens"] == likeliest(engine, "one two", len(text["tokens"]))
    assert text["stopped"] == "tokens" if len(text["tokens"]) == 12 else text["tokens"][-1] == 0


def test_a_text_is_printed_as_its_tokens_come(trained, capsys):
    folder, _ = trained
    words = (folder, "--prompt", "one ", "--tokens", 20, "--seed", 4)
    (text,) = texts(capsys, *words)
    code, out, err = call(capsys, *words)
    assert code == 0
    assert out == text["prompt"] + text["text"] + "\n"
    assert "prefill 4 tokens at " in err
    assert "decode " in err
    assert "cache 1,024 bytes a token on a rank" in err  # keys and values of 2 layers, 32 numbers of 8 bytes


def test_prompts_have_draws_of_their_own_and_seeds_repeat_them(trained, capsys):
    folder, _ = trained
    words = (folder, *("--prompt", "one") * 2, "--tokens", 20, "--temperature", 2)
    first, second = texts(capsys, *words)
    again = texts(capsys, *words)
    other, _ = texts(capsys, *words, "--seed", 5)
    assert [first["tokens"], second["tokens"]] == [text["tokens"] for text in again]
    assert first["tokens"] != second["tokens"]
    assert first["tokens"] != other["tokens"]


def test_tokens_that_only_the_model_has_are_never_drawn(trained, capsys):
    """300 tokens of the model, nearly equally likely, of which bytes are 256."""
    folder, _ = trained
    found = texts(capsys, folder, *("--prompt", "x") * 4, "--tokens", 25, "--temperature", 100)
    drawn = [token for text in found for token in text["tokens"]]
    assert len(set(drawn)) > 40
    assert max(drawn) < 256


def test_a_prompt_is_read_from_standard_input(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("two thrée".encode()), encoding="ascii"))
    (text,) = texts(capsys, trained[0], "--prompt", "-", "--tokens", 1)
    assert text["prompt"] == "two thrée"


@pytest.mark.parametrize(
    ("words", "option"), [(["--prompt", b"ok\xff"], "--prompt"), (["--system", b"ok\xff"], "--system")]
)
def test_an_argument_of_another_encoding_is_refused(trained, capsys, words, option):
    code, _, err = call(capsys, trained[0], words[0], os.fsdecode(words[1]), "--tokens", 1)
    assert code == 2
    assert err.splitlines()[-1] == f"nanotrain: {option}: not UTF-8 text (character 3)"


def test_standard_input_of_another_encoding_is_refused(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, _, err = call(capsys, trained[0], "--prompt", "-")
    assert code == 2
    assert err.splitlines()[-1] == "nanotrain: --prompt -: standard input is not UTF-8 (byte 4)"


def test_a_text_ends_with_what_the_model_can_read(trained, capsys):
    """After 45 tokens of 48 three more can be read, and one follows these."""
    words = (trained[0], "--prompt", "x" * 45, "--tokens", 9, "--temperature", 0)
    (text,) = texts(capsys, *words)
    assert len(text["tokens"]) == 4
    assert text["stopped"] == "limit"
    _, _, err = call(capsys, *words)
    assert "4 of 9 tokens: the model reads no more than 48 tokens (max_length)" in err


def test_a_model_without_a_cache_writes_the_same_and_says_so_once(trained, tmp_path, capsys):
    folder, engine = train(tmp_path, use="no_cache", max_length=0, positions="rope")
    words = (folder, *("--prompt", "one two") * 2, "--tokens", 8, "--temperature", 0, "--plugin", NO_CACHE)
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["cache_bytes_per_token"] is None
    assert found["texts"][0]["tokens"] == likeliest(engine, "one two", len(found["texts"][0]["tokens"]))
    assert "the run trained on sequences of 16 tokens, and texts may have" not in err  # they have 15
    assert err.count("model 'no_cache' keeps no cache: each token is computed from the whole text") == 1


def test_texts_longer_than_what_it_was_trained_on_are_told_and_need_no_data(tmp_path, capsys):
    folder, _ = train(tmp_path, max_length=0, positions="rope")
    (tmp_path / "text.txt").unlink()
    code, _, err = call(capsys, folder, "--prompt", "one", "--tokens", 14)
    assert code == 0
    assert "the run trained on sequences of 16 tokens, and texts may have 17" in err


def test_a_checkpoint_and_converted_weights_write_the_same(trained, tmp_path, capsys):
    folder, _ = trained
    options = ("--prompt", "one", "--tokens", 6, "--temperature", 0)
    (expected,) = texts(capsys, folder, *options)
    (file,) = (folder / "checkpoints").glob("step-*")
    assert texts(capsys, file, *options)[0]["tokens"] == expected["tokens"]
    assert texts(capsys, folder, "--step", 1, *options)[0]["tokens"] == expected["tokens"]
    assert main(["convert", str(folder), str(tmp_path / "weights"), "--to", "nanotrain"]) == 0
    capsys.readouterr()
    found = texts(capsys, tmp_path / "weights", "--tokenizer", "bytes", *options)
    assert found[0]["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "x" * 49], "has 49 tokens, but the model reads at most 48"),
        (["--prompt", ""], "the prompt '' has no tokens"),
        (
            ["--special-tokens", "--prompt", "a"],
            "--special-tokens: expected a tokenizer.json, whose special tokens",
        ),
        (["--prompt", "-", "--prompt", "-"], "standard input can be read once"),
        (["--step", "7"], "does not hold a checkpoint of step 7; steps there: 1"),
        (["--degree", "tp"], "--degree: expected DIM=N such as tp=2"),
        (["--degree", "xp=2"], "has no xp (did you mean 'tp'?)"),
        (["--degree", "ep=2"], "topology.ep: ep = 2, but "),
        (["--set", "precision.use=fp46"], "no precision named 'fp46' (did you mean 'fp64'?)"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_mistakes_are_told(trained, capsys, words, says):
    code, out, err = call(capsys, trained[0], *words)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "1.5"], "--top-p: expected a number above 0 and up to 1, got '1.5'"),
        (["--top-p", "0"], "--top-p: expected a number above 0 and up to 1, got '0'"),
        (["--temperature", "-1"], "--temperature: expected 0 or a number above it, got '-1'"),
        (["--temperature", "hot"], "--temperature: expected 0 or a number above it, got 'hot'"),
        (["--top-k", "-3"], "--top-k: expected 0 or a whole number above it, got '-3'"),
        (["--tokens", "0"], "--tokens: expected a whole number above 0, got '0'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_told(trained, capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        call(capsys, trained[0], f"{words[0]}={words[1]}")
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_what_is_no_text_is_told(trained, tmp_path, capsys):
    """A path without anything, weights without a tokenizer, and a run on numbers."""
    folder, _ = trained
    assert "no such file or folder" in call(capsys, folder / "nothing")[2]
    assert main(["convert", str(folder), str(tmp_path / "weights"), "--to", "nanotrain"]) == 0
    _, _, err = call(capsys, tmp_path / "weights")
    assert "has no tokenizer.json, and no recipe that names data: give --tokenizer FILE" in err
    assert "holds weights alone, of no step" in call(capsys, tmp_path / "weights", "--step", 3)[2]
    engine = make_engine(Case("checkpoint", use="simple"), {"run": {"steps": 1}}, folder=tmp_path / "numbers")
    engine.fit()
    _, _, err = call(capsys, tmp_path / "numbers", "--prompt", "x")
    assert "data 'synthetic' has tokens but no text" in err
    assert "--tokenizer" in err
