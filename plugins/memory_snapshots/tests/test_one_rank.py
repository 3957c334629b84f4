"""A run of one rank goes on from its snapshots bit by bit, and from nothing that is not its own."""

import shutil

import pytest
from broken_runs import IDENTITY, RECIPE, attempt, folders, same
from structlog.testing import capture_logs

from nanotrain_core.api import NanotrainError


def reasons(logs):
    """Return why the checkpoint was gone back to."""
    return [each["why"] for each in logs if "restored from the checkpoint" in each["event"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return attempt(tmp_path_factory.mktemp("whole"), "whole")


@pytest.mark.parametrize("step", [2, 5, 9])
def test_it_loses_the_step_in_flight_and_ends_with_the_same_bits(tmp_path, whole, step):
    """It dies before the end of ``step``, of which there is no snapshot therefore."""
    broken = attempt(tmp_path, "run", dies_at=step)
    assert broken.recoverable == [*range(1, step)]
    with capture_logs() as logs:
        ran = attempt(tmp_path, "run", again=True)
    restored = [each for each in logs if each["event"] == "restored from memory"]
    assert [(each["step"], each["steps_lost"]) for each in restored] == [(step - 1, 1)]
    assert (ran.first, [*ran.losses]) == (step - 1, [*range(step, 10)])
    assert ran.losses.items() <= whole.losses.items()
    assert same(ran, whole)
    assert folders(tmp_path) == []


def test_it_may_die_again_and_again(tmp_path, whole):
    attempt(tmp_path, "run", dies_at=3)
    assert attempt(tmp_path, "run", again=True, dies_at=4).first == 2
    assert attempt(tmp_path, "run", again=True, dies_at=8).first == 3
    ran = attempt(tmp_path, "run", again=True)
    assert ran.first == 7
    assert same(ran, whole)


@pytest.mark.parametrize("word", IDENTITY)
def test_what_has_changed_is_named_and_the_run_begins_where_it_would_without(tmp_path, word):
    attempt(tmp_path, "run", dies_at=5)
    with capture_logs() as logs:
        ran = attempt(tmp_path, "run", again=True, identity={**IDENTITY, word: "other"})
    assert (ran.first, reasons(logs)) == (0, [f"changed: {word}"])


def test_a_run_that_a_person_starts_forgets_them(tmp_path):
    attempt(tmp_path, "run", dies_at=5)
    assert attempt(tmp_path, "run", dies_at=1).first == 0
    assert attempt(tmp_path, "run", again=True).first == 0


def test_a_run_in_a_copy_of_a_live_runs_folder_leaves_its_snapshots_alone(tmp_path, whole):
    """The live run dies after the copy has run, and goes on from them."""

    def copy(run):
        shutil.copytree(run.folder, tmp_path / "copy")
        live = folders(tmp_path)
        with capture_logs() as logs:
            assert attempt(tmp_path, "copy", dies_at=1).first == 0
        assert any("is a copy of a live run's" in each["event"] for each in logs)
        assert {*live} < {*folders(tmp_path)}

    attempt(tmp_path, "run", dies_at=5, act=copy)
    ran = attempt(tmp_path, "run", again=True)
    assert ran.first == 4
    assert same(ran, whole)


def test_another_run_on_the_host_keeps_its_own(tmp_path, whole):
    attempt(tmp_path, "one", dies_at=5)
    attempt(tmp_path, "two", dies_at=7)
    assert attempt(tmp_path, "one", again=True).first == 4
    ran = attempt(tmp_path, "two", again=True)
    assert ran.first == 6
    assert same(ran, whole)


def flip(path):
    with path.open("r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_snapshot_is_named_and_the_one_before_taken(tmp_path, whole):
    attempt(tmp_path, "run", dies_at=6)
    newest = max(folders(tmp_path)[0].glob("own-*.json"), key=lambda path: path.stat().st_mtime_ns)
    flip(newest.with_suffix(".bin"))
    with capture_logs() as logs:
        ran = attempt(tmp_path, "run", again=True)
    assert [each["problem"] for each in logs if each["event"] == "a memory snapshot is damaged"] == [
        f"{newest.with_suffix('.bin')} has not the bytes that were sealed"
    ]
    assert ran.first == 4
    assert same(ran, whole)


def test_without_a_whole_one_the_checkpoint_is_loaded(tmp_path, whole):
    recipe = RECIPE.replace("every = 100", "every = 3")
    attempt(tmp_path, "run", dies_at=6, recipe=recipe)
    for path in folders(tmp_path)[0].glob("own-*.bin"):
        flip(path)
    with capture_logs() as logs:
        ran = attempt(tmp_path, "run", again=True, recipe=recipe)
    assert reasons(logs) == ["no snapshot as new as the checkpoint, of step 3, is complete on all ranks"]
    assert ran.first == 3
    assert same(ran, whole)


def test_a_newer_checkpoint_is_loaded(tmp_path, whole):
    recipe = RECIPE.replace("every = 100", "every = 3") + "every = 4\n"
    attempt(tmp_path, "run", dies_at=7, recipe=recipe)
    ran = attempt(tmp_path, "run", again=True, recipe=recipe)
    assert ran.first == 6
    assert same(ran, whole)


def test_nothing_is_kept_where_nobody_starts_ranks_again(tmp_path):
    with capture_logs() as logs:
        ran = attempt(tmp_path, "run", may_restart=False, dies_at=5)
    assert (ran.recoverable, folders(tmp_path)) == ([], [])
    assert any("nobody would start the ranks again" in each["event"] for each in logs)


def test_a_host_without_the_memory_refuses_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("nanotrain_memory_snapshots.monitor.missing", lambda folder, nbytes: "1 MB is free")
    with pytest.raises(NanotrainError, match=r"need 0\.000\d+ GB on .*, and 1 MB is free: give hosts"):
        attempt(tmp_path, "run")


def test_memory_that_is_gone_when_it_is_reserved_refuses_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(NanotrainError, match=r"cannot have their memory in .*: No space left on device"):
        attempt(tmp_path, "run")


@pytest.mark.parametrize(
    ("shm", "text"),
    [("shm", "no path that begins with /"), ("/nowhere/x", "No such .*; expected a folder in")],
)
def test_a_folder_that_is_none_is_refused(tmp_path, shm, text):
    with pytest.raises(NanotrainError, match=text):
        attempt(tmp_path, "run", shm=shm)
