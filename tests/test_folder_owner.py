"""A run folder is claimed by one run at a time, and missed where it is gone."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_folders import run_once
from structlog.testing import capture_logs

from nanotrain_core.errors import Exit, FolderError, FolderLocked
from nanotrain_core.launch.attempts import LaunchHistory
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.launch.resume_point import with_claimed_folder
from nanotrain_core.launch.worker import Job, share_folder
from nanotrain_core.run import folder as folders
from nanotrain_core.run.folder import (
    LOOKS,
    RunFolder,
    claimed_by,
    hold_as_rank,
    is_gone,
    stop_without,
)
from nanotrain_core.run.stop import StopRequest


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_second_run_in_a_folder_is_told_who_owns_it():
    first = RunFolder.claim("a", folder="here")
    with pytest.raises(FolderLocked, match=f"process {os.getpid()} on ") as caught:
        RunFolder.claim("a", folder="here", resume=True)
    assert caught.value.exit_code == Exit.LOCKED
    first.release()


def test_a_claim_with_patience_waits_for_the_owner_to_end(capsys):
    """As after the loss of a host, whose lock a shared file system keeps for a while."""
    first = RunFolder.claim("a", folder="here")
    threading.Timer(0.3, first.release).start()
    RunFolder.claim("a", folder="here", resume=True, patience=20.0).release()
    assert "is in use by another run" in (said := capsys.readouterr().err)
    assert said.count("waiting up to 20 seconds for it to end") == 1


@pytest.mark.parametrize("again", [True, False])
def test_ranks_that_are_started_again_wait_for_the_lock_of_a_host_that_is_gone(again):
    job = SimpleNamespace(claimed=None, folder="here", resume=None, scratch=None)
    recipe = SimpleNamespace(run=SimpleNamespace(name="a", folder=None, timeout=300.0))
    ranks, past = SimpleNamespace(rank=0, world_size=1), LaunchHistory(began=again)
    first = RunFolder.claim("a", folder="here")
    threading.Timer(0.3, first.release).start()
    if not again:
        with pytest.raises(FolderLocked):
            share_folder(job, ranks, recipe, None, past)
        return
    path, claimed = share_folder(job, ranks, recipe, None, past)
    assert str(path) == "here"
    claimed.release()


def test_ranks_that_died_before_they_had_a_folder_take_none_of_an_older_run():
    """The new run had gone on in the older one, whose steps were done, and trained nothing."""
    run_once("a")
    recipe = SimpleNamespace(run=SimpleNamespace(name="a", folder=None, timeout=300.0))
    ranks, job = Ranks(), Job(recipe="a")
    path, claimed = share_folder(job, ranks, recipe, None, LaunchHistory(began=True))
    assert str(path) == "runs/a-2"
    claimed.release()
    with pytest.raises(FolderError, match="runs/a holds a run already"):
        share_folder(Job(recipe="a", folder="runs/a"), ranks, recipe, None, LaunchHistory(began=True))
    path, claimed = share_folder(job, ranks, recipe, None, LaunchHistory(began=True, folder="runs/a"))
    assert str(path) == "runs/a"
    claimed.release()


def test_a_folder_is_found_again_by_the_launch_that_has_claimed_it():
    """Without a store that outlives an attempt, ranks that torchrun restarted had gone on in the newest."""
    mine = ("host0 7 /tmp/logs", "host1 7 /tmp/logs")
    recipe = SimpleNamespace(run=SimpleNamespace(name="a", folder=None))
    run_once("a", agents=mine)
    run_once("a", agents=["another"])
    assert with_claimed_folder(LaunchHistory(agents=mine[1:]), Job(recipe="a"), recipe).folder == "runs/a"
    assert with_claimed_folder(
        LaunchHistory(agents=mine), Job(recipe="a", folder="runs/a-2"), recipe
    ) == LaunchHistory(agents=mine)
    with pytest.raises(FolderError, match="runs/a-2 holds a run already"):
        RunFolder.claim("a", folder="runs/a-2", agents=mine)
    assert with_claimed_folder(
        LaunchHistory(agents=mine), Job(recipe="a", folder="runs/a-2"), recipe
    ) == LaunchHistory(agents=mine)
    assert str(claimed_by(["another"], "a")) == "runs/a-2"


def test_the_lock_of_a_killed_run_is_free_again(tmp_path):
    code = (
        "import os, signal; from nanotrain_core.run.folder import RunFolder; "
        "claim = RunFolder.claim('a', folder='here'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert killed.returncode == -9
    assert json.loads((tmp_path / "here" / ".lock").read_text())["pid"] != os.getpid()
    RunFolder.claim("a", folder="here").release()


def test_each_claim_of_a_folder_is_another_also_within_a_second():
    first = RunFolder.claim("a", folder="here")
    owner = first.owner()
    first.release()
    RunFolder.claim("a", folder="here", resume=True).release()
    with pytest.raises(FolderError, match="another run has used here since this one did"):
        RunFolder.claim("a", folder="here", resume=True, after=owner)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="the run folder file/run cannot be written: Not a directory"):
        RunFolder.claim("a", folder="file/run")


def test_a_file_system_without_locks_is_told_and_borne(monkeypatch, tmp_path):
    def refuse(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with capture_logs() as logs:
        claimed = RunFolder.claim("first", folder=str(tmp_path / "here"))
    assert json.loads((tmp_path / "here/.lock").read_text())["pid"] == os.getpid()
    assert [entry["problem"] for entry in logs] == ["Function not implemented"]
    assert "nothing keeps a second run out" in logs[0]["event"]
    claimed.release()


def test_a_run_that_has_begun_keeps_its_name_where_only_writable_files_can_be_locked(monkeypatch):
    flock = fcntl.flock

    def on_nfs(file, how):
        if how & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    first = RunFolder.claim("a")  # and has written nothing yet
    assert run_once("a") == "runs/a-2"
    first.release()


def test_a_lock_of_another_user_that_can_only_be_read_is_seen(monkeypatch):
    first = RunFolder.claim("a")

    def of_another_user(path, mode, **options):
        if mode == "r+":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open(path, mode, **options)

    monkeypatch.setattr(folders, "open", of_another_user, raising=False)
    with monkeypatch.context() as looking:
        looking.setattr(folders, "holds_run", lambda path: False)
        assert folders._is_used(first.path)
        first.release()
        assert not folders._is_used(first.path)


def test_a_disk_without_space_is_told(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(FolderError, match="the run folder here cannot be written: File too large"):
            RunFolder.claim("a", folder="here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_is_lost_after_several_looks_and_not_in_a_remount(tmp_path, monkeypatch):
    lost = threading.Event()

    class Stop(StopRequest):
        def request(self, reason):
            super().request(reason)
            lost.set()

    remount = [True] * (LOOKS - 1) + [False]
    looks = remount + [True] * LOOKS
    monkeypatch.setattr(folders, "BETWEEN", 0)
    monkeypatch.setattr(folders, "is_gone", lambda path, held: looks.pop(0))
    stop = Stop()
    with hold_as_rank(tmp_path) as held:
        stop_without(tmp_path, held, stop)
        assert lost.wait(60)
    assert stop._requested == {"lost"}
    assert looks == []


@pytest.mark.parametrize(("problem", "gone"), [(errno.ESTALE, True), (errno.EIO, False)])
def test_a_folder_that_another_client_of_nfs_deleted_is_gone(tmp_path, monkeypatch, problem, gone):
    """The server answers ESTALE then for the file that is open."""

    def fstat(file):
        raise OSError(problem, os.strerror(problem))

    with hold_as_rank(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat)
            found = is_gone(tmp_path, held)
        assert found is gone


def test_a_replaced_folder_is_noticed_where_stat_is_cached(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    with hold_as_rank(folder) as held:
        cached = held.fileno()
        assert not is_gone(folder, held)
        shutil.rmtree(folder)
        folder.mkdir()
        with hold_as_rank(folder):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "stat", lambda path, **options: os.fstat(cached))
                found = is_gone(folder, held)
            assert found
