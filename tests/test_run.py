"""``nanotrain run`` as a user meets it: what it prints, leaves behind and exits with."""

import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from command import begin, finish, nanotrain, start
from safetensors.torch import load_file

from nanotrain_core.errors import Exit

SMALL = """
[run]
name = "small"
steps = 6
device = "cpu"

[batch]
sequences = 4
microbatch = 1
length = 16

[evaluation]
sequences = 4

[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 64

[[parallel]]
use = "ddp"

[checkpoint]
use = "simple"
every = 3
keep = 9

[data]
use = "synthetic"
vocab = 64
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def metrics(folder, event="step"):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == event]


def test_a_pipeline_says_how_the_model_is_split_by_what_its_pieces_cost(recipe, tmp_path):
    changes = ["topology.pp=2", 'schedule.use="1f1b"', "model.layers=4", "model.vocab=512", "run.steps=1"]
    options = [word for change in changes for word in ("--set", change)]
    done = nanotrain("run", "small.toml", "--nproc", "2", "--folder", "2", *options, cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    # forward, a token: a layer 2 * 16 * 16^2 + 16 * 2 * 16 = 8,704, the head 2 * 512 * 16 = 16,384
    assert "stages 3 | 1 + head: the busiest rank has 1.02 times the mean FLOPs" in done.out
    drawn = nanotrain("schedule", "small.toml", *options, "--set", "run.ranks=2", cwd=tmp_path)
    assert drawn.out.endswith("0: embedding, layers 0 to 2\nstage 1 on rank 1: layer 3, head\n")


@pytest.mark.full
def test_a_pipeline_that_hands_over_through_memory_reports_the_losses_of_one_rank(recipe, tmp_path):
    model = ["--set", "model.layers=4", "--set", "run.steps=3"]
    pipeline = ["--set", "topology.pp=2", "--set", 'schedule.use="interleaved_1f1b"']
    for ranks, options in (("1", model), ("2", [*model, *pipeline])):
        done = nanotrain("run", "small.toml", "--nproc", ranks, "--folder", ranks, *options, cwd=tmp_path)
        assert (done.code, done.err) == (Exit.DONE, "")
    for event, fields in (("step", ("loss", "grad_norm")), ("evaluation", ("loss",))):
        one, two = metrics(tmp_path / "1", event), metrics(tmp_path / "2", event)
        assert len(one) == len(two) > 0
        for ours, theirs in zip(two, one, strict=True):
            for field in fields:
                assert ours[field] == pytest.approx(theirs[field], rel=1e-4)


def first_line(outcome):
    return outcome.err.splitlines()[0]


@pytest.mark.full
def test_four_ranks_report_the_losses_of_one(recipe, tmp_path):
    for ranks in ("1", "4"):
        done = nanotrain("run", "small.toml", "--nproc", ranks, "--folder", ranks, cwd=tmp_path)
        assert (done.code, done.err) == (Exit.DONE, "")
    one, four = metrics(tmp_path / "1"), metrics(tmp_path / "4")
    assert [row["step"] for row in four] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(four, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_output_that_is_no_terminal_is_plain_lines(recipe, tmp_path):
    done = nanotrain("run", "small.toml", cwd=tmp_path)
    assert "\r" not in done.out
    assert "\x1b" not in done.out
    step = next(line for line in done.out.splitlines() if line.startswith("step=1/6"))
    assert dict(pair.split("=") for pair in step.split()).keys() >= {"loss", "grad_norm", "lr", "tokens/s"}


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_resumed_run_ends_with_the_same_bytes(recipe, tmp_path, ranks):
    whole = nanotrain("run", "small.toml", "--nproc", ranks, "--folder", "whole", cwd=tmp_path)
    nanotrain("run", "small.toml", "--nproc", ranks, "--folder", "half", cwd=tmp_path)
    (tmp_path / "half/checkpoints/step-00000006.safetensors").unlink()
    resumed = nanotrain("run", "small.toml", "--nproc", ranks, "--folder", "half", "--resume", cwd=tmp_path)
    assert (whole.code, resumed.code) == (Exit.DONE, Exit.DONE)
    assert "resumed after step 3" in resumed.out
    last = "checkpoints/step-00000006.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "half" / last).read_bytes()


@pytest.mark.full
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four(recipe, tmp_path):
    nanotrain("run", "small.toml", "--nproc", "2", "--folder", "two", cwd=tmp_path)
    start_at = str(tmp_path / "two/checkpoints/step-00000003.safetensors")
    expected = load_file(tmp_path / "two/checkpoints/step-00000006.safetensors")
    for ranks in ("1", "4"):
        words = ("run", "small.toml", "--nproc", ranks, "--folder", ranks, "--resume", start_at)
        assert nanotrain(*words, cwd=tmp_path).code == Exit.DONE
        found = load_file(tmp_path / ranks / "checkpoints/step-00000006.safetensors")
        names = [name for name in expected if not name.startswith("rng/")]
        for name in names:
            assert (found[name] - expected[name]).abs().max() < 1e-5, name


def test_the_resolved_recipe_of_a_run_repeats_it(recipe, tmp_path):
    nanotrain("run", "small.toml", "--set", "run.seed=7", "--folder", "a", cwd=tmp_path)
    explained = (tmp_path / "a/recipe.explained").read_text()
    assert re.search(r"^seed = 7 +# --set #1$", explained, re.MULTILINE)
    assert re.search(r"^width = 16 +# small.toml:18$", explained, re.MULTILINE)
    began = json.loads((tmp_path / "a/run.log.jsonl").read_text().splitlines()[0])
    assert began["command"].endswith("run small.toml --set run.seed=7 --folder a")
    assert began["host"] == socket.gethostname()
    again = nanotrain("run", "a/recipe.toml", "--folder", "b", cwd=tmp_path)
    assert again.code == Exit.DONE
    assert [row["loss"] for row in metrics(tmp_path / "a")] == [
        row["loss"] for row in metrics(tmp_path / "b")
    ]


@pytest.mark.parametrize(
    ("number", "code", "reason", "told"),
    [
        (
            signal.SIGINT,
            Exit.INTERRUPTED,
            "interrupted",
            "nanotrain: stopping after this step and a checkpoint, ",
        ),
        pytest.param(signal.SIGTERM, Exit.PREEMPTED, "preempted", "", marks=pytest.mark.full),  # see the next
        pytest.param(signal.SIGHUP, Exit.PREEMPTED, "preempted", "", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, Exit.PREEMPTED, "preempted", "", marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_all_ranks_at_a_checkpointed_step(recipe, tmp_path, number, code, reason, told):
    words = ("run", "small.toml", "--nproc", "2", "--set", "run.steps=100000", "--folder", "here")
    running = begin(*words, cwd=tmp_path)
    running.wait_for("step=5/")
    running.send_signal(number)
    ended = running.end()
    assert (ended.code, len(ended.err.splitlines())) == (code, 1 if told else 0)
    assert ended.err.startswith(told)
    (end,) = metrics(tmp_path / "here", "end")
    assert end["reason"] == reason
    assert (tmp_path / f"here/checkpoints/step-{end['step']:08d}.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize("whom", ["group", "everyone"])
def test_sigterm_to_all_processes_ends_the_run_as_one_to_the_launcher_does(recipe, tmp_path, whom):
    """``timeout`` tells the process group, and the launcher twice; Slurm tells every process, ranks too."""
    words = ("run", "small.toml", "--nproc", "2", "--set", "run.steps=100000", "--folder", "here")
    process = start(*words, cwd=tmp_path, start_new_session=True)
    next(line for line in process.stdout if line.startswith("step=5/"))
    if whom == "group":
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
    else:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, ended.err) == (Exit.PREEMPTED, "")
    (end,) = metrics(tmp_path / "here", "end")
    assert end["reason"] == "preempted"
    assert (tmp_path / f"here/checkpoints/step-{end['step']:08d}.safetensors").exists()


def session(leader):
    """Return the processes of a session."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with contextlib.suppress(OSError):
            found += [pid] if os.getsid(pid) == leader else []
    return found


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(recipe, tmp_path):
    words = ("run", "small.toml", "--folder", "here", "--set", "run.steps=100000")
    first = begin(*words, cwd=tmp_path)
    first.wait_for("step=1/")
    second = nanotrain(*words, "--resume", cwd=tmp_path)
    assert second.code == Exit.LOCKED
    assert "here is in use by another run: process " in first_line(second)
    assert first.process.is_alive()
    first.send_signal(signal.SIGTERM)
    assert first.end().code == Exit.PREEMPTED


def test_a_rank_that_dies_is_named(recipe, tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    words = ("run", "small.toml", "--nproc", "2", "--plugin", "deadly.py", "--set", 'monitor.2.use="deadly"')
    ended = nanotrain(*words, cwd=tmp_path)
    assert ended.code == Exit.FAILED
    assert ended.err == "nanotrain: rank 1 was killed by SIGKILL\n"


DEADLY = """
import os, signal
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    pass

def build(config):
    from nanotrain_core.contracts import Monitor

    class Deadly(Monitor):
        def on_start(self, run):
            self.rank = run.rank

        def on_step(self, report):
            if self.rank == 1 and report.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    return Deadly()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="deadly", config=Config, factory=f"{__name__}:build"))
"""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.toml"], "missing.toml"),
        (
            ["small.toml", "--set", "run.stps=3"],
            "--set #1: run.stps: unknown key 'stps' (did you mean 'steps'?)",
        ),
        (
            ["small.toml", "--set", 'run.steps="3"'],
            "--set #1: run.steps: expected an integer, got the string '3'",
        ),
        (
            ["small.toml", "--set", "optimizer.use=adamx"],
            "no optimizer named 'adamx' (did you mean 'adamw'?)",
        ),
        (["small.toml", "--nproc", "3"], "3"),
        (["small.toml", "--set", "topology.pp=2"], "pp"),
        (["small.toml", "--set", "data.vocab=65"], "has 65 tokens but the model's vocabulary is 64"),
        (["small.toml", "--set", "batch.sequences=8192"], "8192"),
        (["small.toml", "--set", "data.use=text", "--set", 'data.paths=["nowhere"]'], "nowhere"),
        (["small.toml", "--folder", "small.toml/x"], "the run folder small.toml/x cannot be written"),
        (["small.toml", "--resume", "7"], "no checkpoint at"),
        (["small.toml", "--nproc", "2", "--resume", "runs/none"], "no checkpoint at runs/none: it does not"),
        (["small.toml", "--nproc", "2", "--resume", "x" * 5000], "characters ...]xxx"),
        (["small.toml", "--nnodes", "2", "--nproc", "1"], "needs --rdzv-endpoint HOST:PORT"),
    ],
)
def test_a_mistake_is_told_in_plain_words_before_anything_is_trained(recipe, tmp_path, words, text):
    ended = nanotrain("run", *words, cwd=tmp_path)
    assert ended.code == Exit.USER
    assert text in ended.err
    assert "Traceback" not in ended.err
    assert "step=" not in ended.out


def test_a_mistake_found_on_the_ranks_is_told_once(recipe, tmp_path):
    ended = nanotrain("run", "small.toml", "--nproc", "2", "--set", "batch.sequences=8192", cwd=tmp_path)
    assert ended.code == Exit.USER
    assert len(ended.err.splitlines()) == 1
