"""No run is overwritten: folders are numbered, and a run does not write where another has begun."""

import errno
import os
import shutil
import stat
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from run_folders import run_once

from nanotrain_core.contracts import Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import CheckpointError, FolderError, FolderLocked
from nanotrain_core.run import folder as folders
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.folder import (
    RunFolder,
    hold_as_rank,
    is_surely_gone,
)
from nanotrain_core.run.stop import Rollback
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_new_runs_of_one_name_are_numbered():
    assert [run_once("a"), run_once("a"), run_once("a")] == ["runs/a", "runs/a-2", "runs/a-3"]


def test_a_resumed_run_takes_the_newest():
    run_once("a")
    run_once("a")
    assert run_once("a", resume=True) == "runs/a-2"


def test_the_newest_has_the_highest_number_though_older_runs_were_deleted():
    """A new run had taken the place of a deleted one, and a resumed one the older; or it began anew."""
    assert [run_once("a") for _ in range(3)][-1] == "runs/a-3"
    shutil.rmtree("runs/a")
    shutil.rmtree("runs/a-2")
    assert run_once("a", resume=True) == "runs/a-3"
    assert run_once("a") == "runs/a-4"
    assert run_once("a", resume=True) == "runs/a-4"


def test_a_name_that_ends_in_a_number_is_another_run_s():
    run_once("gpt")
    run_once("gpt-7")
    Path("runs/gpt-7/recipe.toml").write_text('[run]\nname = "gpt-7"\n')
    assert run_once("gpt", resume=True) == "runs/gpt"
    assert run_once("gpt") == "runs/gpt-2"
    assert run_once("gpt-7") == "runs/gpt-7-2"


def test_a_folder_of_a_run_that_was_refused_hides_no_run():
    run_once("a")
    refused = RunFolder.claim("a")
    refused.release()
    assert str(refused.path) == "runs/a-2"
    assert run_once("a", resume=True) == "runs/a"
    assert run_once("a") == "runs/a-2"
    assert run_once("a", resume=True) == "runs/a-2"


def test_a_named_folder_that_holds_a_run_is_refused_unless_resumed():
    run_once("a", folder="here")
    with pytest.raises(FolderError, match="holds a run already: add --resume"):
        RunFolder.claim("a", folder="here")
    assert run_once("a", folder="here", resume=True) == "here"


BATCHES = [(torch.arange(8)[None], torch.arange(1, 9)[None])]


class Does(Monitor):
    """Calls a function after each step."""

    def __init__(self, act):
        self.act = act

    def on_step(self, report):
        self.act()


def script(folder, steps=0, act=None, **settings):
    """Return an engine for a tiny model, after a call of fit if it has steps."""
    model = torch.nn.Embedding(9, 9)
    settings = ScriptConfig(folder=folder, save_every=1, **settings)
    callbacks = [Does(act)] if act else []
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters()), settings, callbacks=callbacks)
    if steps:
        engine.fit(BATCHES, steps=steps)
    return engine


def test_a_script_does_not_train_where_another_does(tmp_path):
    """Both had saved there, and each deleted the checkpoints of the other."""

    def train_there_too():
        with pytest.raises(FolderLocked) as caught:
            script(tmp_path, 9, resume="auto")
        told.append(str(caught.value))

    told = []
    assert script(tmp_path, 2, train_there_too).run.checkpoint.steps() == [1, 2]
    assert len(told) == 2
    assert told[0].startswith(f"{tmp_path} is in use by another run: process {os.getpid()} on ")
    assert script(tmp_path, 3, resume="auto").step == 3


def test_a_child_of_a_script_does_not_hold_its_folder(tmp_path):
    """Workers of a loader outlive a killed script by seconds."""

    def fork():
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        os.close(ours)
        children.append((child, theirs))

    children = []
    script(tmp_path, 1, fork)
    RunFolder.claim("next", folder=str(tmp_path), resume=True).release()
    for child, pipe in children:
        os.close(pipe)
        os.waitpid(child, 0)


def test_an_engine_goes_on_in_its_folder_unless_another_run_was_there(tmp_path):
    engine = script(tmp_path, 1)
    engine.fit(BATCHES, steps=2)
    RunFolder.claim("other", folder=str(tmp_path), resume=True, agents=["x"]).release()
    with pytest.raises(FolderError, match=r"another run has used .* since this one did: make a new engine"):
        engine.fit(BATCHES, steps=3)


def test_a_script_that_begins_anew_leaves_the_checkpoints_of_one_that_was_faster(tmp_path):
    late = script(tmp_path)
    script(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has checkpoints of a run \(steps 1\)"):
        late.fit(BATCHES, steps=1)


class Replaces(Monitor):
    """Moves the run folder away in a step, and puts another run's in its place."""

    def __init__(self, folder, at):
        self.folder, self.at = folder, at

    def on_step(self, report):
        if report.step == self.at:
            self.folder.rename(f"{self.folder}.old")
            shutil.copytree(f"{self.folder}.old", self.folder)
        return Rollback(4, "test") if report.step == self.at == 4 else None


def replaced(case, folder, at):
    """Train with a folder that is replaced after a step; return how it ends and which steps are there."""
    engine = make_engine(case, CHANGES, folder=folder)
    folder.mkdir(exist_ok=True)
    rank = engine.run.mesh.rank
    engine.events.monitors.append(Replaces(folder, at if rank == 0 else None))
    with hold_as_rank(folder) as held, pytest.MonkeyPatch.context() as patched:
        patched.setattr(folders, "BETWEEN", 0)
        engine.stop.folder_gone = partial(is_surely_gone, folder, held, engine.stop)
        end = engine.fit()
    return end.reason, end.step, engine.run.checkpoint.steps()


CHANGES = {"run": {"steps": 9}, "checkpoint": {"use": "simple", "every": 2, "keep": 1}}


@pytest.mark.parametrize(("at", "step", "there"), [(5, 6, [4]), (4, 4, [2])], ids=["save", "rollback"])
def test_a_run_whose_folder_was_replaced_writes_nothing_there(at, step, there, tmp_path):
    """A rank that was suspended had saved in the new run's folder, and deleted that run's checkpoints."""
    assert replaced(Case("optimizer", use="sgd"), tmp_path / "run", at) == ("lost", step, there)


@pytest.mark.full
def test_all_ranks_stop_when_the_first_finds_the_folder_replaced(tmp_path):
    case = Case("parallel", use="ddp", topology={"dp": 2})
    assert run_ranks(replaced, 2, case, tmp_path / "run", 5) == [("lost", 6, [4])] * 2


def test_files_are_written_where_folders_cannot_be_flushed(tmp_path, monkeypatch):
    """As on SMB or FUSE: nothing could be saved."""
    fsync = os.fsync

    def no_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or fails:
            raise OSError(code, "cannot be flushed")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    for code, fails in ((errno.EINVAL, False), (errno.EINVAL, True), (errno.EIO, False)):
        refused = fails or code == errno.EIO
        with pytest.raises(OSError, match="cannot be flushed") if refused else nullcontext():
            write_text_atomically(tmp_path / str(code), "whole")
    assert (tmp_path / str(errno.EINVAL)).read_text() == "whole"
