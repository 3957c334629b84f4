"""``nanotrain ckpt``: what it says of the built-in checkpoint, and what it refuses."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from command import COMMAND, nanotrain
from safetensors.torch import load_file
from test_damaged_checkpoints import change_state
from test_run import SMALL

from nanotrain_core.checkpoint import simple_listing
from nanotrain_core.checkpoint.listing import expect_own_kind
from nanotrain_core.cli import main
from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train 6 steps with a checkpoint after each third."""
    folder = tmp_path_factory.mktemp("ckpt")
    (folder / "small.toml").write_text(SMALL)
    ended = nanotrain("run", "small.toml", "--folder", "run", cwd=folder)
    assert ended.code == Exit.DONE, ended.err
    return folder


def ckpt(*words, cwd):
    return nanotrain("ckpt", *words, cwd=cwd)


def test_lists_steps_with_kind_and_ranks(run):
    ended = ckpt("ls", "run", cwd=run)
    rows = [line.split() for line in ended.out.splitlines()[1:]]
    assert ended.code == Exit.DONE, ended.err
    assert [(row[0], row[1], row[4]) for row in rows] == [("3", "simple", "1"), ("6", "simple", "1")]
    assert ckpt("list", "run", cwd=run).out == ended.out


def test_shows_one_step_and_its_recipe(run):
    ended = ckpt("show", "run", "--step", "3", cwd=run)
    assert "step         3" in ended.out, ended.err
    assert "exp_avg_sq: " in ended.out
    described = json.loads(ckpt("show", "run", "--json", cwd=run).out)
    assert (described["step"], described["meta"]["data"]["position"] > 0) == (6, True)
    (run / "again.toml").write_text(ckpt("show", "run", "--recipe", cwd=run).out)
    assert nanotrain("check", "again.toml", cwd=run).code == Exit.DONE


@pytest.mark.full
def test_replay_arrives_at_the_same_bytes(run):
    ended = ckpt("replay", "run/checkpoints", cwd=run)
    assert ended.code == Exit.DONE, ended.out + ended.err
    assert ended.out.endswith("RESUME VERIFIED\n")


def test_a_missing_step_is_told_with_those_that_are_there(run):
    ended = ckpt("show", "run", "--step", "4", cwd=run)
    assert (ended.code, "steps there: 3, 6" in ended.err) == (Exit.USER, True)
    assert "steps there: none" in ckpt("ls", "small.toml", cwd=run).err
    assert "nowhere: no such file or folder" in ckpt("ls", "nowhere", cwd=run).err


def test_convert_keeps_every_tensor(run):
    ended = ckpt("convert", "run", "out", "--to", "simple", "--step", "3", cwd=run)
    assert ended.code == Exit.DONE, ended.err
    before, after = (
        load_file(run / folder / "checkpoints/step-00000003.safetensors") for folder in ("run", "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "is there already" in ckpt("convert", "run", "out", "--to", "simple", cwd=run).err


def test_verify_names_the_damaged_one(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for path in (run / "run/checkpoints").iterdir():
        (tmp_path / "checkpoints" / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "checkpoints/step-00000006.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ended = ckpt("verify", ".", cwd=tmp_path)
    assert ended.code == Exit.USER
    assert ended.out.splitlines()[0] == "step 3: whole"
    assert "step-00000006.safetensors is damaged" in ended.out.splitlines()[1]


@pytest.mark.parametrize("when", ["listed", "described", "verified"])
def test_a_checkpoint_that_a_live_run_deletes_meanwhile_is_no_damage(
    run, tmp_path, monkeypatch, capsys, when
):
    """It was a traceback, or told to be damaged."""
    shutil.copytree(run / "run", tmp_path / "run")
    name = {"listed": "_saved", "described": "_describe", "verified": "_verify"}[when]
    asked = getattr(simple_listing, name)

    def deleted(path):
        if path.name == "step-00000003.safetensors":
            path.unlink(missing_ok=True)
        return asked(path)

    monkeypatch.setattr(simple_listing, name, deleted)
    action = "verify" if when == "verified" else "ls"
    assert main(["ckpt", action, str(tmp_path / "run")]) == Exit.DONE
    out = capsys.readouterr().out
    assert "damaged" not in out
    assert out.count("deleted meanwhile") == (when != "listed")
    assert ("step 6: whole" if action == "verify" else "         6  simple") in out


def norm(meta):
    meta["model"]["norm_eps"] = 0.1


def layers(meta):
    meta["model"]["layers"] = 2
    meta["recipe"] = meta["recipe"].replace("layers = 1", "layers = 2")


def stranger(meta):
    meta["model"]["use"] = "elsewhere"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (norm, "unlike its recipe, its state is of another model: model.norm_eps is 0.1 there"),
        (layers, "it has no tensor layers.1.attn.k.weight, expected with shape"),
        (stranger, "no model named 'elsewhere'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_verify_compares_the_model_with_the_recipe_and_the_tensors(run, tmp_path, change, said):
    """Verified as whole, such a checkpoint was then refused by every resume."""
    path = tmp_path / "step-00000006.safetensors"
    path.write_bytes((run / "run/checkpoints" / path.name).read_bytes())
    ended = ckpt("verify", ".", cwd=tmp_path)
    assert ended.out.splitlines()[0] == "step 6: whole"
    assert "also compares its own recipe and data" in ended.err
    change_state(path, "simple", change)
    ended = ckpt("verify", ".", cwd=tmp_path)
    assert (ended.code, "Traceback" in ended.err) == (Exit.USER, False)
    assert said in ended.out


def in_a_phase(meta):
    meta["model"]["rope_theta"] = 20000.0
    meta["recipe"] += "\n[[phase]]\nuntil_tokens = 96\n\n[[phase]]\n[phase.model]\nrope_theta = 20000.0\n"


def test_verify_accepts_a_model_that_a_phase_has_changed(run, tmp_path):
    path = tmp_path / "step-00000006.safetensors"
    path.write_bytes((run / "run/checkpoints" / path.name).read_bytes())
    change_state(path, "simple", in_a_phase)
    ended = ckpt("verify", ".", cwd=tmp_path)
    assert (ended.code, ended.out) == (Exit.DONE, "step 6: whole\n")
    change_state(path, "simple", norm)  # which no phase changes
    assert "its state is of another model: model.norm_eps is 0.1" in ckpt("verify", ".", cwd=tmp_path).out


@pytest.fixture(scope="module")
def mixed(run):
    """Return a function that fills a folder: ``simple`` checkpoints of given steps, a sharded one of 3."""
    assert ckpt("convert", "run", "other", "--to", "sharded_v2", "--step", "3", cwd=run).code == Exit.DONE

    def fill(folder, *steps):
        shutil.copytree(run / "other/checkpoints", folder / "checkpoints")
        for step in steps:
            name = f"checkpoints/step-{step:08d}.safetensors"
            shutil.copy(run / "run" / name, folder / name)
        return folder

    return fill


def test_the_newest_of_several_kinds_is_opened_for_its_weights(run, mixed, tmp_path, capsys):
    reader = open_weights(mixed(tmp_path, 6), load_plugins()).reader
    newest = load_file(run / "run/checkpoints/step-00000006.safetensors")
    assert torch.equal(reader.read("norm.weight", (slice(0, 16),)), newest["norm.weight"])
    assert ckpt("verify", ".", cwd=tmp_path).out == "step 3, sharded_v2: whole\nstep 6, simple: whole\n"
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "nanotrain"]) == Exit.DONE
    assert "parameters of model 'transformer', step 6, in 1 file" in capsys.readouterr().out


def test_two_kinds_of_the_newest_step_are_refused_by_name(mixed, tmp_path):
    said = r"step-00000003 and .*step-00000003\.safetensors; name one by its path"
    with pytest.raises(CheckpointError, match=said):
        open_weights(mixed(tmp_path, 3), load_plugins())
    assert open_weights(tmp_path / "checkpoints/step-00000003", load_plugins()).reader.shapes


@pytest.mark.parametrize(
    "words",
    [("show", "."), ("show", ".", "--step", "3"), ("convert", ".", "out", "--to", "simple"), ("replay", ".")],
)
def test_two_kinds_of_the_step_that_is_asked_for_are_refused_by_name(mixed, tmp_path, words):
    """The one whose kind comes later in the alphabet had been taken, without a word."""
    ended = ckpt(*words, cwd=mixed(tmp_path, 3))
    assert ended.code == Exit.USER
    assert (
        ". has checkpoints of several kinds of step 3: checkpoints/step-00000003 and checkpoints/"
        in ended.err
    )
    assert ended.err.endswith("step-00000003.safetensors; name one by its path\n")


def test_a_resume_where_another_kind_has_the_newest_step_is_refused(mixed, tmp_path):
    """It had gone on from an older step, or branch, without a word. A step that is named is not refused."""
    folder, registry = mixed(tmp_path, 6), load_plugins()
    said = (
        r"holds checkpoints of 'simple' \(steps 6\) and no newer one of 'sharded_v2' than that of step 3: "
        r'set checkpoint.use = "simple", or name a step: --resume 3'
    )
    with pytest.raises(CheckpointError, match=said):
        expect_own_kind(folder, "latest", "sharded_v2", registry)
    for resume, use in (("3", "sharded_v2"), (None, "sharded_v2"), ("latest", "simple"), ("6", "simple")):
        expect_own_kind(folder, resume, use, registry)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["auto", "--folder", "run", "--set", "checkpoint.use=sharded_v2"],
            "run/checkpoints holds checkpoints of 'simple' (steps 3, 6) and none of 'sharded_v2': "
            'set checkpoint.use = "simple", or see `nanotrain ckpt convert`',
        ),
        (
            ["run/checkpoints/step-00000003.safetensors", "--set", "checkpoint.use=sharded_v2"],
            "step-00000003.safetensors holds checkpoints of 'simple' (steps 3)",
        ),
        (
            ["run"],
            "run is no checkpoint but holds some; expected one, such as run/checkpoints/step-00000006.saf",
        ),
    ],
)
def test_a_resume_from_what_another_kind_wrote_or_from_a_whole_run_is_refused(run, words, text):
    before = sorted((run / "run").rglob("*"))
    ended = nanotrain("run", "small.toml", "--resume", *words, cwd=run)
    assert (ended.code, "Traceback" in ended.err) == (Exit.USER, False)
    assert text in ended.err
    assert sorted((run / "run").rglob("*")) == before


@pytest.mark.full
def test_a_name_that_no_terminal_can_show_is_no_traceback(tmp_path):
    ended = subprocess.run(
        [*map(os.fsencode, COMMAND), b"ckpt", b"verify", b"\xff\xfe"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == Exit.USER
    assert b"Traceback" not in ended.stderr
