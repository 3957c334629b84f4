"""What a run leaves for who looks later: declarations of its metrics, samples, its owner."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from nanotrain_core.builtin.configs import JsonlConfig, SampleConfig
from nanotrain_core.errors import DataError
from nanotrain_core.launch.launch_monitors import keep_recipe
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import Bins, Metric, Rule, describe, described
from nanotrain_core.metrics.history import read_metrics
from nanotrain_core.monitors.jsonl import Jsonl
from nanotrain_core.monitors.sample import Sample
from nanotrain_core.recipe import resolve_recipe, write_resolved
from nanotrain_core.recipe.write import explain
from nanotrain_core.run.folder_owner import is_running

OWN = (
    Metric(name="wind/{place}", unit="m/s", group="weather", summary="a", rule=Rule(warn_above=3, high="b")),
    Metric(name="rain", unit="mm", group="weather", summary="c", kind="histogram", bins=Bins(low=0, high=9)),
)


@pytest.mark.parametrize("metric", [*CORE, *OWN], ids=lambda metric: metric.name)
def test_a_declaration_goes_through_json(metric):
    assert described(json.loads(json.dumps(describe(metric)))) == metric


def test_the_file_has_the_declarations_of_the_newest_attempt(tmp_path):
    info = {"name": "x", "folder": tmp_path, "steps": 9, "first_step": 0, "rank": 0, "world_size": 1}
    info |= {"device": "cpu", "parameters": 7, "tokens_per_step": 8, "flops_per_token": 9.0}
    Jsonl(JsonlConfig()).on_start(SimpleNamespace(**info, declared=(*CORE, OWN[0])))
    assert [*read_metrics(tmp_path).declared.values()] == [*CORE, OWN[0]]
    changed = Metric(name="wind/{place}", unit="km/h", group="weather", summary="a")
    Jsonl(JsonlConfig()).on_start(SimpleNamespace(**info, declared=(changed,)))
    with open(tmp_path / "metrics.jsonl", "a") as file:  # of a version that knows other fields
        file.write(json.dumps({"event": "declared", "metrics": [{"name": "x", "color": "red"}]}) + "\n")
    found = read_metrics(tmp_path)
    assert found.declared["wind/{place}"] == changed
    assert found.torn == 1


@pytest.mark.parametrize(("webhook", "mode"), [("https://hooks.example/S3CRET", 0o600), ("", 0o644)])
def test_a_recipe_with_a_secret_is_its_owners_alone(tmp_path, webhook, mode):
    """It is kept whole, for who repeats the run: all who could read the folder had its secrets."""
    rules = f"monitor.3.to={{webhook='{webhook}'}}"
    found = resolve_recipe("laptop", overrides=["monitor.3.use='alerts'", rules])
    texts = write_resolved(found.recipe), explain(found.recipe, found.merged)
    before = os.umask(0o022)
    try:
        keep_recipe(tmp_path, *texts)
    finally:
        os.umask(before)
    kept = [tmp_path / "recipe.toml", tmp_path / "recipe.explained"]
    assert [path.stat().st_mode & 0o777 for path in kept] == [mode, mode]
    assert kept[0].read_text() == texts[0]
    keep_recipe(tmp_path, *texts)  # as a resumed run does
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_recipe_that_a_resume_goes_back_to_is_the_newest_again(tmp_path):
    """``nanotrain report`` shows the newest: it was the one that the run had left."""
    for lr in ("1e-3", "0.5", "0.5", "1e-3"):
        keep_recipe(tmp_path, f"lr = {lr}", f"lr = {lr}  # from the recipe")
    found = {path.name: path.read_text() for path in tmp_path.glob("*.toml")}
    assert found == {"recipe.toml": "lr = 1e-3", "recipe-2.toml": "lr = 0.5", "recipe-3.toml": "lr = 1e-3"}
    assert (tmp_path / "recipe-3.explained").is_file()


def test_samples_are_kept_in_the_folder(tmp_path, monkeypatch, capsys):
    sample = Sample(SampleConfig(prompt="def "))
    data = SimpleNamespace(encode=lambda text: [1], decode=lambda tokens: "def f():\né")
    monkeypatch.setattr(Sample, "_tokens", lambda self, prompt, seed: [])
    sample.on_start(SimpleNamespace(rank=0, folder=tmp_path, data=data, steps=9, length=16))
    sample._write(3)
    (row,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert (row["step"], row["prompt"], row["text"]) == (3, "def ", "def f():\né")

    def refuse(*_):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=refuse, flush=refuse))
    sample._write(4)  # `head` has closed the pipe
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_a_sample_ends_with_its_document(tmp_path, capsys):
    """The most likely token is the last one's successor, and 5 ends a document."""
    codec = SimpleNamespace(separator=5)
    data = SimpleNamespace(encode=lambda text: [1], decode=str, tokenizer_alone=lambda: codec)
    successors = torch.eye(8).roll(1, 1)
    run = SimpleNamespace(rank=0, folder=tmp_path, data=data, steps=9, length=4, device="cpu")
    run.logits = lambda tokens: successors[tokens]
    for data.tokenizer_alone, expected in (
        (lambda: codec, "[1, 2, 3, 4]"),
        (lambda: SimpleNamespace(separator=None), "[1, 2, 3, 4, 5, 6]"),
    ):
        sample = Sample(SampleConfig(prompt="a", tokens=5, temperature=0.0))
        sample.on_start(run)
        sample._write(3)
        assert f"\n{expected}\n" in capsys.readouterr().out


def test_a_prompt_that_is_no_text_of_the_data_leaves_samples_out(tmp_path, capsys):
    """The error of ``encode`` ended the run, or was followed by another at its end."""
    sample = Sample(SampleConfig(prompt="def "))

    def encode(text):
        raise DataError("expected numbers")

    run = SimpleNamespace(rank=0, folder=tmp_path, data=SimpleNamespace(encode=encode), steps=9, length=16)
    with capture_logs() as logged:
        sample.on_start(run)
    sample.on_end(SimpleNamespace(reason="finished", step=9))
    assert [(line["event"], line["why"]) for line in logged] == [
        ("no samples will be written", "expected numbers")
    ]
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_run_is_running_while_its_owner_is_there(tmp_path):
    assert not is_running(tmp_path)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": "now"}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    assert is_running(tmp_path)
    (tmp_path / ".lock").write_text(json.dumps({**owner, "host": "elsewhere"}))
    assert not is_running(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / ".lock").write_text(json.dumps({**owner, "pid": gone.pid}))
    assert not is_running(tmp_path)
    (tmp_path / ".lock").write_text("torn {")
    assert not is_running(tmp_path)
