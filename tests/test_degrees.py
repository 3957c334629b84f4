"""Degrees that do not divide are refused before a process starts, with the reason and what would do."""

import subprocess
import sys

import pytest
from recipe_files import write

from nanotrain_core.errors import RecipeError
from nanotrain_core.recipe import load_recipe

WRAPPERS = """
[[parallel]]
use = "tp"

[[parallel]]
use = "ep_deepseek"

[[parallel]]
use = "ddp"
"""

GPT = (
    """\
[run]
steps = 1
[batch]
sequences = 8
microbatch = 2
length = 12
[model]
use = "transformer"
layers = 4
width = 48
heads = 6
vocab = 60
ffn = 96
[data]
use = "synthetic"
vocab = 60
"""
    + WRAPPERS
)

DEEPSEEK = GPT.replace(
    'use = "transformer"',
    """\
use = "deepseek"
kv_rank = 8
nope_size = 4
rope_size = 4
value_size = 4
experts = 6
top_k = 2
expert_ffn = 9""",
)

REFUSED = {
    "heads": (
        GPT.replace("vocab = 60", "vocab = 64"),
        4,
        ["topology.tp=4"],
        [
            "recipe.toml:11: model.heads: 6 heads do not divide by tp = 4; tp could be 3 or 6, their number "
            "4 or 8"
        ],
    ),
    "kv_heads": (
        GPT,
        2,
        ["topology.tp=2", "model.kv_heads=4"],
        ["--set #2: model.kv_heads: 4 kv_heads do not divide 6 heads"],
    ),
    "vocabulary": (
        GPT,
        6,
        ["topology.tp=6", "model.vocab=5", "data.vocab=5", "data.branching=2"],
        ["--set #2: model.vocab: 5 tokens of the vocabulary are fewer than tp = 6 ranks"],
    ),
    "feed-forward width": (
        GPT,
        3,
        ["topology.tp=3", "model.ffn=100"],
        [
            "--set #2: model.ffn: 100 columns of the feed-forward layer do not divide by tp = 3; tp could be "
            "2, their number 99 or 102"
        ],
    ),
    "length": (
        GPT,
        2,
        ["topology.tp=2", "batch.length=1"],
        [
            "--set #2: batch.length: 1 tokens are fewer than tp = 2 ranks, each of which takes a share of "
            "them for sequence_parallel; nearest: 2"
        ],
    ),
    "length with experts": (
        DEEPSEEK.replace("expert_ffn = 9", "expert_ffn = 10"),
        2,
        ["topology.tp=2", "batch.length=1", "parallel.0.sequence_parallel=false"],
        [
            "--set #2: batch.length: 1 tokens are fewer than tp = 2 ranks, each of which takes a share of "
            "them for its experts; nearest: 2"
        ],
    ),
    "shared experts": (
        DEEPSEEK,
        2,
        ["topology.tp=2"],
        [
            "recipe.toml:15: model.expert_ffn: 9 columns of the shared experts do not divide by tp = 2; "
            "tp could be 1 or 3, their number 8 or 10"
        ],
    ),
    "experts": (
        DEEPSEEK,
        4,
        ["topology.ep=4"],
        [
            "recipe.toml:13: model.experts: 6 experts do not divide by ep = 4; ep could be 3 or 6, "
            "their number 4 or 8"
        ],
    ),
    "width of experts": (
        DEEPSEEK,
        2,
        ["topology.etp=2"],
        [
            "recipe.toml:15: model.expert_ffn: 9 columns of an expert do not divide by etp = 2; etp could be "
            "1 or 3, their number 8 or 10"
        ],
    ),
    "no experts": (
        GPT,
        4,
        ["topology.ep=2", "topology.etp=2"],
        [
            "--set #1: topology.ep: ep = 2, but model 'transformer' has no experts; expected 1",
            "--set #2: topology.etp: etp = 2, but model 'transformer' has no experts; expected 1",
        ],
    ),
    "no experts left": (
        DEEPSEEK,
        2,
        ["topology.ep=2", "model.dense_layers=4"],
        ["--set #1: topology.ep: ep = 2, but model 'deepseek' has no experts; expected 1"],
    ),
    "layers": (
        GPT,
        8,
        ["topology.pp=8", "schedule.use=1f1b"],
        [
            "--set #2: schedule: '1f1b': 4 layers cannot fill 8 stages (pp 8): at most pp = 4, or list "
            "[schedule] layers, where a stage may have 0"
        ],
    ),
    "sequences": (
        GPT,
        3,
        ["batch.microbatch=1"],
        [
            "recipe.toml:4: batch.sequences: 8 would leave some of dp = 3 ranks without a sequence in the "
            "last of 3 microbatches, in which all take part; nearest: 6 or 9, or batch.microbatch = 2"
        ],
    ),
    "ranks": (
        GPT,
        6,
        ["topology.tp=4"],
        [
            "--nproc: run.ranks: 6 ranks do not fit [topology]: pp 1 x cp 1 x tp 4 = 4 does not divide 6; "
            "4 or 8 ranks would do",
            "recipe.toml:11: model.heads: 6 heads do not divide by tp = 4; tp could be 3 or 6, their number "
            "4 or 8",
        ],
    ),
    "ranks, stages and experts": (
        GPT,
        6,
        ["topology.pp=8", "schedule.use=1f1b", "topology.ep=2"],
        [
            "--nproc: run.ranks: 6 ranks do not fit [topology]: pp 8 x cp 1 x tp 1 = 8 does not divide 6; "
            "16 or 32 ranks would do",
            "--set #2: schedule: '1f1b': 4 layers cannot fill 8 stages (pp 8): at most pp = 4, or list "
            "[schedule] layers, where a stage may have 0",
            "--set #3: topology.ep: ep = 2, but model 'transformer' has no experts; expected 1",
        ],
    ),
    "ranks, decay and an idle dimension": (
        GPT,
        3,
        ["topology.cp=2", "optimizer.lr_schedule.decay_steps=2"],
        [
            "--nproc: run.ranks: 3 ranks do not fit [topology]: pp 1 x cp 2 x tp 1 = 2 does not divide 3; "
            "2 or 4 ranks would do",
            "--set #2: optimizer.lr_schedule.decay_steps: 0 steps of warm-up and 2 of decay do not fit into "
            "a run of 1 steps",
            "--set #1: topology.cp: cp = 2, but no component of this recipe handles cp; write [[parallel]] "
            'with use = "cp", or set cp = 1',
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_plain_words(tmp_path, name):
    text, ranks, overrides, lines = REFUSED[name]
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), overrides=overrides, ranks=ranks)
    assert [line.replace(f"{tmp_path}/", "") for line in caught.value.lines] == lines


@pytest.mark.parametrize("command", ["check", "run"])
def test_commands_refuse_without_torch(tmp_path, command):
    text, _, overrides, (line,) = REFUSED["experts"]
    words = [command, str(write(tmp_path, text)), "--nproc", "4", "--set", overrides[0]]
    code = (
        "import sys; from nanotrain_core.cli import main\n"
        f"code = main({words!r})\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "no process started"
