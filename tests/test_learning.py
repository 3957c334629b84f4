"""Finished runs: nanoGPT gets the recipe's settings and text, and both are judged on the same text."""

import json
import math
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from benchmarks.gap import unpaired
from benchmarks.learning import nanogpt, ours
from benchmarks.learning.__main__ import RECIPES, main
from benchmarks.learning.records import OURS, PEER, Finished, Plan, append, read
from benchmarks.learning.table import tables
from nanotrain_core.batch import Shard
from nanotrain_core.errors import DataError, RecipeError
from nanotrain_core.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / RECIPES[0])
SMALL = (
    "batch.length=16",
    "batch.microbatch=4",
    "batch.sequences=8",
    "evaluation.every=0",
    "evaluation.sequences=8",
    "model.layers=1",
    "model.max_length=16",
    "model.width=32",
    "optimizer.lr_schedule.warmup_steps=1",
    "run.steps=3",
    f"data.paths=['{ROOT / 'benchmarks' / 'gpu'}']",
)

#: Takes nanoGPT's place: its settings, data files, prints and checkpoint, with a model that knows no context.
TRAIN = """
import pickle, numpy as np, os, torch
from model import GPT, GPTConfig
n_layer = n_head = n_embd = block_size = batch_size = gradient_accumulation_steps = 0
warmup_iters = lr_decay_iters = max_iters = eval_interval = eval_iters = log_interval = 0
bias = compile = False
learning_rate = min_lr = weight_decay = beta1 = beta2 = grad_clip = 0.0
dataset = device = dtype = ""
exec(open("configurator.py").read())
torch.manual_seed(1337)
seeded = torch.initial_seed()
meta = pickle.load(open(f"data/{dataset}/meta.pkl", "rb"))
tokens = torch.from_numpy(np.fromfile(f"data/{dataset}/train.bin", np.uint16).astype(np.int64))
args = dict(vocab_size=meta["vocab_size"], block_size=block_size)
model = GPT(GPTConfig(**args))
model.logits.data = torch.log(torch.bincount(tokens, minlength=args["vocab_size"]).float() + 1)
print(f"number of parameters: {seeded:.2f}M")
os.makedirs("out")
for step in range(max_iters + 1):
    if step == max_iters:
        saved = {"model": model.state_dict(), "model_args": args, "iter_num": step}
        torch.save(saved, "out/ckpt.pt")
    print(f"iter {step}: loss {5 - step:.4f}, time {2 ** step:.2f}ms, mfu -100.00%")
"""
MODEL = """
from dataclasses import dataclass
import torch
@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(config.vocab_size))
    def forward(self, tokens, targets):
        logits = self.logits.expand(*tokens.shape, -1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
"""
#: As nanoGPT's does: settings by name, of the type that the script has.
CONFIGURATOR = """
import sys
from ast import literal_eval
for word in sys.argv[1:]:
    key, value = word[2:].split("=")
    try:
        value = literal_eval(value)
    except (SyntaxError, ValueError):
        pass
    assert type(value) == type(globals()[key]), key
    globals()[key] = value
"""


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    for name, text in (("train.py", TRAIN), ("model.py", MODEL), ("configurator.py", CONFIGURATOR)):
        (folder / name).write_text(text)
    return folder


def recipe(*changes):
    return load_recipe(Path(RECIPE), overrides=[*SMALL, *changes])


def test_nanogpt_is_given_the_recipes_settings():
    given = nanogpt.options(recipe("optimizer.clip_norm=2"))
    assert given["gradient_accumulation_steps"] * given["batch_size"] * given["block_size"] == 8 * 16
    assert (given["n_layer"], given["n_embd"], given["n_head"], given["bias"]) == (1, 32, 4, True)
    assert (given["beta1"], given["beta2"], given["grad_clip"]) == (0.9, 0.95, 2.0)
    assert given["learning_rate"] == 1e-3
    assert given["min_lr"] == pytest.approx(1e-4)
    assert (given["max_iters"], given["lr_decay_iters"], given["eval_interval"]) == (3, 3, 3)
    assert (given["device"], given["dtype"], given["compile"]) == ("cpu", "float32", False)
    gpu = nanogpt.options(load_recipe(ROOT / "recipes" / "gpt_125m.toml"))
    assert (gpu["device"], gpu["dtype"], gpu["compile"]) == ("cuda", "bfloat16", True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.norm=rmsnorm", "model.norm is rmsnorm: nanoGPT's is layernorm"),
        ("model.max_length=32", "model.max_length is 32: nanoGPT's is 16"),
        ("optimizer.lr_schedule.use=wsd", "optimizer.lr_schedule.use is wsd: nanoGPT's is cosine"),
    ],
)
def test_what_nanogpt_has_not_is_refused_by_its_key(change, said):
    with pytest.raises(RecipeError, match=said):
        nanogpt.refuse_others(recipe("model.bias=false", change))


def test_another_model_is_refused():
    with pytest.raises(RecipeError, match=r"model\.positions is None: nanoGPT's is learned"):
        nanogpt.refuse_others(load_recipe(ROOT / RECIPES[1]))


def test_the_files_hold_what_is_trained_on_and_nothing_that_is_held_out(tmp_path):
    small = recipe()
    data = ours.opened(small)
    nanogpt.write_text(data, 16, tmp_path / "text")
    train, val = (np.fromfile(tmp_path / "text" / f"{name}.bin", np.uint16) for name in ("train", "val"))
    assert len(train) == data.train * 16
    assert len(val) == data.validation * 16
    seen = {tuple(row) for row in train.reshape(-1, 16).tolist()}
    ran = data.train_batch(data.train, Shard(0, 1)).tokens.tolist()
    assert seen == {tuple(row) for row in ran}
    read = "\0".join(path.read_text() for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.py")))
    assert read.startswith(bytes(train.astype(np.uint8)[: 16 * 9]).decode())  # the tenth sequence is held out


def test_text_that_would_be_read_twice_is_refused():
    with pytest.raises(DataError, match="steps read 8000000 sequences, but there are"):
        ours.opened(recipe("run.steps=1000000"))


@pytest.mark.full
def test_the_peer_is_seeded_and_its_saved_model_judged_on_our_held_out_text(tmp_path, clone):
    small = recipe()
    data = ours.opened(small)
    run = nanogpt.train(Plan(PEER, RECIPE, 7, SMALL), small, data, clone, tmp_path / "run")
    assert run.model.startswith("7.00 million")  # the stand-in prints its seed there
    assert run.training == (5.0, 4.0, 3.0)  # without the step after the last, which it makes too
    assert run.tokens_per_second == 8 * 16 / 3 * 1000  # the median of 1, 2, 4 and 8 ms
    counts = np.bincount(
        np.fromfile(tmp_path / "run" / "data" / "text" / "train.bin", np.uint16), minlength=256
    )
    logs = torch.log_softmax(torch.log(torch.tensor(counts).float() + 1), 0)
    targets = data.validation_batch(0, 8, Shard(0, 1)).targets
    assert run.held_out == pytest.approx(-float(logs[targets].mean()), rel=1e-5)
    assert run.held_out_tokens == 8 * 16
    assert run.bits_per_byte == pytest.approx(run.held_out / math.log(2))


@pytest.mark.full
def test_each_run_is_made_once_and_a_table_needs_no_training(tmp_path, clone, capsys):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text("<!-- learning: begin -->\n<!-- learning: end -->\n")
    arguments = [RECIPE, "--runs", str(file), "--nanogpt", str(clone), "--seeds", "1", "2"]
    arguments += [
        "--folder",
        str(tmp_path / "runs"),
        *(word for change in SMALL for word in ("--set", change)),
    ]
    assert main(arguments) == 0
    first = file.read_text()
    assert main([*arguments, "--markdown", str(page)]) == 0
    assert file.read_text() == first
    assert tables(read(file)) in page.read_text()
    assert "95% interval" in capsys.readouterr().out

    our, theirs, *_ = read(file)
    assert (our.plan.who, theirs.plan.who) == (OURS, PEER)
    rows = (tmp_path / "runs" / "gpt_small-nanotrain-1" / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(row) for row in rows]
    assert list(our.training) == [row["loss"] for row in kinds if row["event"] == "step"]
    assert our.held_out == next(row["loss"] for row in kinds if row["event"] == "evaluation")
    assert our.tokens == theirs.tokens == 3 * 8 * 16
    assert our.held_out_tokens == theirs.held_out_tokens


def made(who, seed, loss):
    return Finished(
        plan=Plan(who, "a.toml", seed),
        model="a model",
        text="a text",
        steps=10,
        tokens=100,
        training=(3.0, loss),
        validation=((10, loss),),
        held_out=loss,
        held_out_tokens=10,
        bytes_per_token=2.0,
        tokens_per_second=1000.0,
        seconds=60.0,
        machine="a machine",
    )


def test_a_line_is_read_as_it_was_written(tmp_path):
    run = attrs.evolve(made(OURS, 1, 1.5), plan=Plan(OURS, "a.toml", 1, ("run.steps=3",)))
    append(tmp_path / "runs.jsonl", run)
    assert read(tmp_path / "runs.jsonl") == [run]


@pytest.mark.parametrize(("shift", "word"), [(0.001, "contains 0: equal within"), (0.5, "excludes 0")])
def test_equal_is_what_chance_explains(shift, word):
    runs = [made(OURS, seed, 1.5 + shift + seed / 100) for seed in (1, 2, 3)]
    runs += [made(PEER, seed, 1.5 + seed / 100) for seed in (1, 2, 3)]
    assert word in tables(runs)
    assert f"{shift:+.4f}; 95% interval" in tables(runs)
    assert "95%" not in tables(runs[:3])


def test_the_interval_of_unpaired_means_is_welchs():
    # scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(), with 7 degrees of freedom for 7.64.
    a, b = (27.5, 21.0, 19.0, 23.6, 17.0, 17.9), (27.1, 22.0, 20.8, 23.4, 23.4, 23.5)
    assert unpaired(a, b) == pytest.approx((-2.3667, -6.7061, 1.9728), abs=2e-3)
    assert unpaired((1.0, 1.0), (1.0, 1.0)) == (0.0, 0.0, 0.0)
