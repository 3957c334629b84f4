"""Runs that save shards: exported, converted, stopped and resumed through the commands."""

import json
import signal
import time

import pytest
import torch
from command import finish, nanotrain, start
from safetensors.torch import load_file
from test_run import SMALL, metrics

from nanotrain_core.errors import Exit

SHARDED = SMALL.replace('use = "simple"', 'use = "sharded_v2"')


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train the same on two ranks with both kinds of checkpoint."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, text in (("sharded", SHARDED), ("simple", SMALL)):
        (folder / f"{name}.toml").write_text(text)
        ended = nanotrain("run", f"{name}.toml", "--nproc", "2", "--folder", name, cwd=folder)
        assert ended.code == Exit.DONE, ended.err
    return folder


def test_a_checkpoint_is_told_when_it_is_there(runs):
    rows = metrics(runs / "sharded", "checkpoint")
    assert [row["step"] for row in rows] == [3, 6]
    assert all(0 < row["blocked"] <= row["seconds"] for row in rows)


def test_exports_what_the_whole_file_exports(runs):
    for name in ("sharded", "simple"):
        ended = nanotrain("convert", name, f"{name}-hf", cwd=runs)
        assert ended.code == Exit.DONE, ended.err
    one, other = (load_file(runs / f"{name}-hf/model.safetensors") for name in ("sharded", "simple"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_converts_into_the_whole_file_and_back(runs):
    for words in (("sharded", "whole", "--to", "simple"), ("whole", "shards", "--to", "sharded_v2")):
        ended = nanotrain("ckpt", "convert", *words, cwd=runs)
        assert ended.code == Exit.DONE, ended.err
    assert nanotrain("ckpt", "verify", "shards", cwd=runs).out == "step 6: whole\n"
    name = "checkpoints/step-00000006.safetensors"
    one, other = load_file(runs / "whole" / name), load_file(runs / "simple" / name)
    state = {name for name in other if not name.startswith("rng/")}
    assert state <= one.keys()
    assert all(torch.equal(one[name], other[name]) for name in state)
    shown = [json.loads(nanotrain("ckpt", "show", f, "--json", cwd=runs).out) for f in ("sharded", "shards")]
    assert shown[0]["tensors"].keys() == shown[1]["tensors"].keys()
    assert shown[0]["meta"]["data"] == shown[1]["meta"]["data"]


@pytest.mark.full_cases("simple-sharded_v2")
@pytest.mark.parametrize(("kind", "other"), [("simple", "sharded_v2"), ("sharded_v2", "simple")])
def test_a_converted_checkpoint_of_one_rank_keeps_its_random_streams(tmp_path, kind, other):
    (tmp_path / "one.toml").write_text(SMALL.replace('use = "simple"', f'use = "{kind}"'))
    (tmp_path / "other.toml").write_text(SMALL.replace('use = "simple"', f'use = "{other}"'))
    steps = [
        ("run", "one.toml", "--folder", "one", "--set", "run.steps=3"),
        ("ckpt", "convert", "one", "as-other", "--to", other),
        ("ckpt", "convert", "as-other", "back", "--to", kind),
    ]
    for words in steps:
        ended = nanotrain(*words, cwd=tmp_path)
        assert ended.code == Exit.DONE, ended.err
    assert streams(tmp_path / "back") == streams(tmp_path / "one") == streams(tmp_path / "as-other")


def streams(folder):
    """Return the random streams of rank 0 in the newest checkpoint of a run, whatever its kind."""
    path = sorted(folder.glob("checkpoints/step-*"))[-1]
    file = path / "rank-00000.safetensors" if path.is_dir() else path
    tensors = {name.removeprefix("rng/0/"): tensor for name, tensor in load_file(file).items()}
    return {name: tensors[name].tolist() for name in ("torch", "python")}


def test_a_converted_checkpoint_is_gone_on_with(runs):
    words = ["--resume", "shards-resumed/checkpoints/step-00000003", "--folder", "resumed", "--nproc", "1"]
    ended = nanotrain(
        "ckpt", "convert", "simple", "shards-resumed", "--to", "sharded_v2", "--step", "3", cwd=runs
    )
    assert ended.code == Exit.DONE, ended.err
    ended = nanotrain("run", "sharded.toml", *words, cwd=runs)
    assert ended.code == Exit.DONE, ended.err
    losses = [row["loss"] for row in metrics(runs / "resumed")]
    assert losses == pytest.approx([row["loss"] for row in metrics(runs / "simple")][3:], rel=1e-5)


@pytest.mark.full  # the first tier sends one to a run in tests/test_run.py
def test_sigterm_loses_no_step_though_files_are_written_beside_training(runs):
    words = (
        "run",
        "sharded.toml",
        "--folder",
        "stopped",
        "--set",
        "run.steps=100000",
        "--set",
        "checkpoint.every=2",
    )
    process = start(*words, cwd=runs)
    deadline = time.monotonic() + 60
    while not (runs / "stopped/checkpoints/latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == Exit.PREEMPTED
    (last,) = metrics(runs / "stopped", "end")
    saved = metrics(runs / "stopped", "checkpoint")
    assert saved[-1]["step"] == last["step"]
    assert nanotrain("ckpt", "verify", "stopped", "--step", str(last["step"]), cwd=runs).code == Exit.DONE


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_last_checkpoint_that_cannot_be_saved_is_told_though_a_signal_ended_the_run(tmp_path, ranks):
    """Exit code 75 would say that all is there to go on with."""
    (tmp_path / "sharded.toml").write_text(SHARDED)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/checkpoints").write_text("a file where a folder should be")
    words = ["--nproc", ranks, "--folder", "here", "--resume", "auto", "--set", "run.steps=100000"]
    process = start("run", "sharded.toml", *words, "--set", "checkpoint.every=0", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "here/metrics.jsonl").exists() or not metrics(tmp_path / "here", "step"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == Exit.UNSAVED, ended.err
    assert "here/checkpoints cannot be written" in ended.err
    assert "Traceback" not in ended.err
