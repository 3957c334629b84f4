"""``nanotrain data`` as a user calls it, and a recipe that names what it wrote."""

import json

import attrs
import numpy as np
import pytest
from corpora import prepared, texts

from nanotrain_core.cli import main


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(300)))
    return path


def called(capsys, *words):
    """Return the exit code of a command, and what it printed."""
    try:
        code = main([*map(str, words)])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def test_prepare_inspect_and_convert(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    code, printed, _ = called(
        capsys, "data", "prepare", corpus, "--tokenizer", "bytes", "--out", out, "--workers", 1
    )
    tokens = sum(len(text.encode()) + 1 for text in texts(300))
    assert (code, printed) == (0, f"{out}: 300 documents, {tokens:,} tokens in 1 shards\n")
    code, printed, _ = called(capsys, "data", "inspect", out, "--json", "--verify")
    found = json.loads(printed)
    lengths = np.array([len(text.encode()) + 1 for text in texts(300)])
    assert (code, found["documents"], found["tokens"], found["verified"]) == (0, 300, tokens, True)
    for at, value in found["length_percentiles"].items():
        assert value == np.percentile(lengths, int(at), method="nearest")
    code, printed, _ = called(capsys, "data", "inspect", out, "--samples", 2, "--verify")
    assert code == 0
    assert "verified   all 1 shards" in printed
    shown = [line for line in printed.splitlines() if line.startswith("00000, document ")]
    assert len(shown) == 2
    number = int(shown[0].split()[2].rstrip(","))
    assert repr(texts(300)[number].encode()[:60].decode(errors="ignore"))[1:20] in shown[0]
    assert called(capsys, "data", "convert", out, tmp_path / "megatron")[0] == 0
    words = ("data", "convert", tmp_path / "megatron.idx", tmp_path / "back", "--tokenizer", "bytes")
    assert called(capsys, *words)[0] == 0
    tokens_of = [(folder / "00000.tokens").read_bytes() for folder in (out, tmp_path / "back")]
    assert tokens_of[0] == tokens_of[1]


def test_damage_is_told_by_name_with_an_exit_code(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    prepared(out, corpus)
    content = bytearray((out / "00000.tokens").read_bytes())
    content[5] ^= 1
    (out / "00000.tokens").write_bytes(content)
    assert (
        called(capsys, "data", "inspect", out, "--samples", 0)[0] == 0
    )  # sizes are right: it looks no further
    code, _, told = called(capsys, "data", "inspect", out, "--verify")
    assert (code, told) == (2, f"nanotrain: {out / '00000.tokens'} is damaged at byte 0 or behind it\n")


def test_a_tokenizer_that_is_missing_is_told(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    manifest = prepared(out, corpus).manifest
    tokenizer = attrs.evolve(manifest.tokenizer, kind="huggingface", file="gone.json")
    attrs.evolve(manifest, tokenizer=tokenizer).write(out)
    code, _, told = called(capsys, "data", "inspect", out, "--verify")
    assert code == 2
    assert f"{out / 'gone.json'} is missing" in told


def test_mistakes_are_told(corpus, tmp_path, capsys):
    for words, text in (
        (("data",), "the following arguments are required: WHAT"),
        (("data", "inspect", tmp_path / "no"), "does not exist"),
        (("data", "prepare", corpus, "--tokenizer", "bytse", "--out", tmp_path / "o"), "tokenizer bytse"),
        (
            ("data", "prepare", corpus, "--tokenizer", "bytes", "--out", tmp_path / "o", "--suffixes", "txt"),
            "expected suffixes such as .txt, got 'txt'",
        ),
        (("data", "convert", tmp_path / "no", tmp_path / "o"), "index"),
        (("data", "train-tokenizer", corpus, "--vocab", 10, "--out", tmp_path / "t.json"), "at least 257"),
    ):
        code, _, told = called(capsys, *words)
        assert code == 2
        assert text in told


RECIPE = """
[run]
name = "shards"
steps = 4
seed = 1

[batch]
sequences = 4
microbatch = 2
length = 16

[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 256

[optimizer]
use = "sgd"
lr = 0.1

[evaluation]
every = 2

[data]
use = "shards"
paths = ["one", "two"]
weights = [3, 1]
"""


def test_a_recipe_names_folders_beside_it(corpus, tmp_path, capsys):
    for name in ("one", "two"):
        prepared(tmp_path / name, corpus)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    code, _, told = called(capsys, "check", recipe)
    assert code == 0, told
    recipe.write_text(RECIPE.replace("two", "tow"))
    code, _, told = called(capsys, "check", recipe)
    assert code == 2
    assert f"recipe.toml:28: data.paths.1: data folder {tmp_path / 'tow'} does not exist" in told
    assert "did you mean 'two'?" in told
    recipe.write_text(RECIPE.replace("[3, 1]", "[3]"))
    code, _, told = called(capsys, "check", recipe)
    assert code == 2
    assert "1 weights for 2 paths: expected one for each" in told
