"""Ranks end with their launcher, also where nobody waits for it, and nobody trains beside them meanwhile."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from command import finish, nanotrain, start
from test_run import SMALL

from nanotrain_core.errors import Exit, FolderLocked
from nanotrain_core.run import folder
from nanotrain_core.run.folder import RunFolder, hold_as_rank
from nanotrain_core.run.folder_owner import is_alive


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.full
def test_ranks_of_a_launcher_that_is_a_zombie_end_and_the_folder_is_free(tmp_path):
    """As in a container whose first process waits for nobody. They trained on, beside whoever came next."""
    (tmp_path / "small.toml").write_text(SMALL)
    words = ("run", "small.toml", "--nproc", "2", "--folder", "here", "--set", "run.steps=100000")
    process = start(*words, cwd=tmp_path, start_new_session=True)
    next(line for line in process.stdout if line.startswith("step=3 checkpoint="))
    ranks = [int(path.read_text()) for path in pid_files(process.pid)]
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    again = nanotrain(
        "run", "small.toml", "--folder", "here", "--resume", "--set", "run.steps=6", cwd=tmp_path
    )
    assert again.code == 0, again.err
    assert state_of(process.pid) == "Z"
    assert not any(map(is_alive, ranks)), [state_of(rank) for rank in ranks]
    finish(process)


def pid_files(launcher, place=None):
    """Yield the files in which a launcher's ranks left their numbers."""
    for path in Path(place or tempfile.gettempdir()).glob("nanotrain-of-*/*/pid-*"):
        with contextlib.suppress(OSError, ValueError):  # of another run, which is gone
            if os.getsid(int(path.read_text())) == launcher:
                yield path


def test_a_process_that_ends_while_it_is_looked_up_is_not_alive(monkeypatch):
    process = subprocess.Popen(["true"])
    assert process.wait() == 0
    monkeypatch.setattr(os, "kill", lambda pid, signal: None)  # as just before it was reaped
    assert not is_alive(process.pid)
    assert is_alive(os.getpid())


def test_a_folder_whose_ranks_still_end_is_waited_for_and_then_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(folder, "PATIENCE", 0.3)
    monkeypatch.setattr(folder, "SILENCE", 0.1)
    held = hold_as_rank(tmp_path)
    began = time.monotonic()
    with pytest.raises(FolderLocked, match="ranks of a run that has lost its launcher are still ending"):
        RunFolder.claim("x", folder=str(tmp_path))
    assert time.monotonic() - began > 0.3
    assert capfd.readouterr().err.count("waiting for ranks of a run that has lost its launcher to end") == 1
    held.close()
    RunFolder.claim("x", folder=str(tmp_path)).release()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_folder_is_deleted_ends_and_writes_no_other(tmp_path, ranks):
    """It trained on for nobody; or saved into the folder of the run that had taken its place."""
    (tmp_path / "small.toml").write_text(SMALL)
    words = ("run", "small.toml", "--nproc", str(ranks), "--folder", "here", "--set", "run.steps=100000")
    process = start(*words, "--set", "checkpoint.every=0", cwd=tmp_path)
    next(line for line in process.stdout if line.startswith("step=3/"))
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    ended = finish(process)
    assert ended.code == Exit.UNSAVED, ended.err
    assert "the run folder here was deleted or replaced: the run ends and saves no more" in ended.err
    assert not list((tmp_path / "here").glob("checkpoints/*"))
