"""Runs on prepared folders: the losses of one process on every layout, and after a resume on another one.

The last goes on from URLs where it began with the folders themselves.
"""

import json

import pytest
from command import nanotrain

from nanotrain_core.errors import Exit

RECIPE = """
[run]
name = "shards"
steps = 6
device = "cpu"

[batch]
sequences = 4
microbatch = 1
length = 32

[evaluation]
every = 3
sequences = 6

[model]
use = "transformer"
layers = 2
width = 16
heads = 2
vocab = 256

[[parallel]]
use = "ddp"

[precision]
use = "fp64"

[checkpoint]
use = "sharded_v2"
every = 3
keep = 9

[data]
use = "shards"
paths = ["one", "two"]
weights = [0.8, 0.2]
mask_documents = true
"""


def metrics(folder):
    """Return step and losses of all rows; of what a resume told again, once."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = {(r["event"], r["step"]): r["loss"] for r in rows if r["event"] in ("step", "evaluation")}
    return sorted((step, event, loss) for (event, step), loss in found.items())


@pytest.mark.full
def test_layouts_and_resumes_train_on_the_same_tokens(tmp_path):
    for name in ("one", "two"):
        lines = (json.dumps({"text": f"{name} {number} " * (number % 9)}) for number in range(900))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        words = ("data", "prepare", f"{name}.jsonl", "--tokenizer", "bytes", "--out", name, "--workers", "1")
        assert nanotrain(*words, cwd=tmp_path).code == Exit.DONE
    (tmp_path / "recipe.toml").write_text(RECIPE)

    urls = f'cache = "cache"\ncache_gb = 1e-4\nurls = ["file://{tmp_path}/one", "file://{tmp_path}/two"]'
    streaming = RECIPE.replace('use = "shards"', 'use = "streaming"').replace('paths = ["one", "two"]', urls)
    (tmp_path / "streaming.toml").write_text(streaming)

    def run(folder, ranks, *words, recipe="recipe.toml"):
        done = nanotrain("run", recipe, "--nproc", ranks, "--folder", folder, *words, cwd=tmp_path)
        assert (done.code, done.err) == (Exit.DONE, "")

    run("whole", "1")
    expected = metrics(tmp_path / "whole")
    assert len(expected) == 9
    pipeline = ("--set", "topology.pp=2", "--set", 'schedule.use="1f1b"')
    run("pipeline", "4", *pipeline)
    run("resumed", "4", *pipeline, "--set", "run.steps=3")
    run("resumed", "2", "--resume", "--set", "data.read_ahead=0")
    run("streamed", "2", "--set", "run.steps=3")
    run("streamed", "4", "--resume", *pipeline, recipe="streaming.toml")
    for folder in ("pipeline", "resumed", "streamed"):
        found = metrics(tmp_path / folder)
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-9)
