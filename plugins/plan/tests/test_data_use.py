"""Where a run ends in its data: as planned, and as a run leaves it."""

import json

import pytest

from nanotrain_core import RuntimeEngine
from nanotrain_core.api import resolve_recipe
from nanotrain_core.cli import main

RECIPE = """
[run]
steps = {steps}
[batch]
sequences = 8
microbatch = 8
length = 16
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 256
[evaluation]
every = 0
"""

PHASES = """
[[phase]]
until_tokens = 1000
[[phase]]
batch.length = 40
batch.sequences = 3
"""

SYNTHETIC = """
[data]
use = "synthetic"
vocab = 256
sequences = 30
"""


def text_of(folder, count):
    path = folder / "corpus.txt"
    path.write_bytes(bytes(n % 251 + 1 for n in range(count)))
    return f"[data]\nuse = 'text'\npaths = ['{path}']\n"


@pytest.mark.parametrize("phases", ["", PHASES], ids=["one length", "two lengths"])
@pytest.mark.parametrize("data", ["synthetic", "text"])
def test_a_run_ends_in_its_data_where_the_plan_says(data, phases, tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    lines = SYNTHETIC if data == "synthetic" else text_of(tmp_path, 2000)
    path.write_text(RECIPE.format(steps=21) + lines + phases)
    assert main(["plan", str(path), "--hardware", "cpu", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["data"]
    found = resolve_recipe(str(path))
    engine = RuntimeEngine.from_recipe(found.recipe, registry=found.registry)
    engine.fit()
    left = engine.run.feed.meta()
    keys = ("taken", "position", "length", "train")
    assert {key: planned["position"][key] for key in keys} == {key: left[key] for key in keys}
    assert planned["tokens"] == left["tokens"]
    where = planned["position"]["epoch"], planned["position"]["sequence"]
    assert where == divmod(left["position"], left["train"])
    assert where[0] > 0


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (10, "the run ends in epoch 3, after 20 of its 30 sequences. A checkpoint saves the count"),
        (15, "the run ends with epoch 4, of 30 sequences. A checkpoint saves the count"),
    ],
)
def test_a_terminal_says_where_a_run_ends_and_what_is_saved_of_it(steps, told, tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(steps=steps) + SYNTHETIC)
    assert main(["plan", str(path), "--hardware", "cpu"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_without_a_count_of_sequences_there_is_no_epoch(tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(steps=10) + "[data]\nuse = 'text'\npaths = ['missing']\n")
    main(["plan", str(path), "--hardware", "cpu", "--json"])
    position = json.loads(capsys.readouterr().out)["data"]["position"]
    assert position == {
        "taken": 80, "length": 16, "position": None, "train": None, "epoch": None, "sequence": None
    }  # fmt: skip
    main(["plan", str(path), "--hardware", "cpu"])
    assert "the run ends after 80 sequences; how many" in " ".join(capsys.readouterr().out.split())
