"""What launchers leave in the temporary folder is swept by the next one: theirs, and nobody else's."""

import fcntl
import os
import signal
import socket
import tempfile
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
    assert list(left.glob("torchelastic_*"))
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
