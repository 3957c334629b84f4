"""What launchers leave in the temporary folder is swept by the next one: theirs, and nobody else's."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from command import finish, start
from test_orphans import pid_files
from test_run import SMALL

from nanotrain_core.launch.temporary import LOCK, LONGEST, PREFIX, SEMAPHORES, prefix, sweep


@pytest.fixture
def place():
    """Yield a temporary folder with a short name: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.full
def test_nothing_is_left_of_a_run_that_was_killed_with_all_its_ranks(tmp_path, place, monkeypatch):
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setenv("TMPDIR", str(place))
    words = ("run", "small.toml", "--nproc", "2")
    process = start(*words, "--set", "run.steps=100000", cwd=tmp_path, start_new_session=True)
    next(line for line in process.stdout if line.startswith("step=3/"))
    ranks = [int(path.read_text()) for path in pid_files(process.pid, place)]
    assert len(ranks) == 2
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    finish(process)
    (left,) = place.glob(f"{PREFIX}*")
    assert list(left.glob("nanotrain-*"))
    assert list(left.glob("pymp-*"))
    again = finish(start(*words, cwd=tmp_path))
    assert again.code == 0, again.err
    assert [path.name for path in place.iterdir() if not path.name.startswith("torchinductor")] == []
    assert not list(SEMAPHORES.glob(f"sem.{left.name}-*"))


def make(place, name):
    folder = place / f"{prefix()}{name}"
    (folder / "scratch").mkdir(parents=True)
    (folder / LOCK).touch()
    return folder


def test_only_what_is_ours_and_dead_is_swept(tmp_path):
    dead, living, unlocked, ranked = (
        make(tmp_path, name) for name in ("dead", "living", "unlocked", "ranked")
    )
    (unlocked / LOCK).unlink()
    (ranked / "scratch/pid-0").write_text(str(os.getpid()))
    (dead / "scratch/pid-0").write_text(str(2**22 + 1))
    (tmp_path / f"{prefix()}link").symlink_to(living)
    (tmp_path / "pymp-other").mkdir()
    semaphores = tmp_path / "shm"
    semaphores.mkdir()
    for name in ("dead", "living", "other"):
        (semaphores / f"sem.{prefix()}{name}-abc").touch()
    with (living / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path, semaphores)
    left = {path.name for path in tmp_path.iterdir()}
    names = {f"{prefix()}{name}" for name in ("living", "unlocked", "ranked", "link")}
    assert left == names | {"pymp-other", "shm"}
    assert {path.name for path in semaphores.iterdir()} == {
        f"sem.{prefix()}{name}-abc" for name in ("living", "other")
    }


def test_what_another_host_left_in_a_shared_place_is_its_own(tmp_path, monkeypatch):
    """Its launcher may live: with local locks, this host is given the lock."""
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "node7.cluster")
        theirs = make(tmp_path, "1")
    ours = make(tmp_path, "1")
    sweep(tmp_path, tmp_path)
    assert (theirs.exists(), ours.exists()) == (True, False)


def test_sockets_in_a_folder_have_names_that_linux_takes():
    folder = "x" * LONGEST + f"/{prefix()}12345678"
    assert len(f"{folder}/pymp-12345678/listener-12345678") <= 107


BEGINS = """
import os, sys
from pathlib import Path
from nanotrain_core.launch import temporary

temporary.begin()
if sys.argv[1:]:
    temporary.note(Path(sys.argv[1]))
    print("noted", flush=True)
    sys.stdin.read()
    temporary.delete_named()
"""


def begins(place, *words):
    """Begin, like a launcher, with a temporary folder of its own."""
    place.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TMPDIR": str(place)}
    return subprocess.Popen([sys.executable, "-c", BEGINS, *words], env=environment, **pipes)


def test_what_a_job_with_a_temporary_folder_of_its_own_has_left_is_found_by_the_next(tmp_path):
    """Snapshots stayed in memory for good, and later runs on that host were refused for it."""
    kept, ended = tmp_path / "kept", tmp_path / "ended"
    for folder in (kept, ended):
        folder.mkdir()
    running, other = begins(tmp_path / "job-1", str(kept)), begins(tmp_path / "job-2", str(ended))
    assert [each.stdout.readline() for each in (running, other)] == ["noted\n"] * 2
    other.communicate()
    assert (kept.exists(), ended.exists()) == (True, False)
    assert begins(tmp_path / "job-3").wait() == 0
    assert kept.exists()  # its launcher lives
    running.kill()
    running.communicate()
    shutil.rmtree(tmp_path / "job-1")
    assert begins(tmp_path / "job-4").wait() == 0
    assert not kept.exists()


@pytest.mark.full
def test_snapshots_of_a_launcher_that_was_killed_do_not_stay_in_memory(tmp_path, place, monkeypatch):
    (tmp_path / "small.toml").write_text(SMALL)
    memory, job = tmp_path / "memory", place / "job"
    memory.mkdir(), job.mkdir()
    monkeypatch.setenv("TMPDIR", str(job))
    words = ("run", "small.toml", "--nproc", "2", "--max-restarts", "1", "--folder", "one")
    more = (f'monitor.2={{use="memory_snapshots", folder="{memory}"}}', "run.steps=100000")
    process = start(*words, "--set", more[0], "--set", more[1], cwd=tmp_path, start_new_session=True)
    next(line for line in process.stdout if line.startswith("step=3"))
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert len([*memory.iterdir()]) == 2
    time.sleep(2)  # its ranks see that it is gone
    shutil.rmtree(job)
    monkeypatch.setenv("TMPDIR", str(place))
    again = finish(start("run", "small.toml", "--nproc", "2", "--folder", "two", cwd=tmp_path))
    assert again.code == 0, again.err
    assert [*memory.iterdir()] == []
