"""Ranks are started again at once, then after longer pauses, and not for ever without a checkpoint."""

import json
import os
from pathlib import Path
from unittest import mock

import attrs
import pytest

from nanotrain_core.errors import DataError, Exit
from nanotrain_core.launch import cause_of_all_hosts, restarts
from nanotrain_core.launch.cause import Cause, first_cause, leave_failure
from nanotrain_core.launch.cause_of_all_hosts import announce_end, announced_end, first_of_all
from nanotrain_core.launch.hosts import Nodes, is_here
from nanotrain_core.launch.restarts import Restarts
from nanotrain_core.run import files
from nanotrain_core.watch.scratch import FAILED_AT, HAS_SAVED


@pytest.fixture
def paused(monkeypatch):
    """Return a clock that sleeping turns on."""
    clock = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(restarts.time, "sleep", sleep)
    return clock


def test_restarts_without_a_checkpoint_pause_longer_and_are_given_up(tmp_path, paused, capsys):
    deciding = Restarts(tmp_path, 99, lambda: False, lambda cause: cause)

    def again():
        began = paused[0]
        return deciding.again({1: -9}, 1, None), round(paused[0] - began)

    assert [again() for _ in range(3)] == [(True, 0), (True, 1), (True, 2)]
    (tmp_path / HAS_SAVED).touch()
    assert [again() for _ in range(5)] == [(True, 0), (True, 1), (True, 2), (True, 4), (True, 8)]
    assert again() == (False, 0)
    told = capsys.readouterr().err
    assert "rank 1 was killed by SIGKILL; restarting in 2 s (1 of 99) from where it began" in told
    assert "giving up after 5 consecutive restarts without a new checkpoint" in told
    os.utime(tmp_path / HAS_SAVED, ns=(1, 1))  # another one was saved
    assert again() == (True, 0)


class Passing(DataError):
    """An error that a restart cures."""

    restart_helps = True


@pytest.mark.parametrize(("kind", "again"), [(DataError, False), (Passing, True)])
def test_an_error_raised_on_purpose_is_retried_only_if_it_says_that_a_restart_helps(
    tmp_path, capsys, kind, again
):
    deciding = Restarts(tmp_path, 3, lambda: False, lambda own: own)
    leave_failure(tmp_path, 0, kind("the copy was damaged, and deleted"))
    assert deciding.again({0: Exit.USER}, 1, None) is again
    told = "nanotrain: the copy was damaged, and deleted; restarting (1 of 3) from where it began\n"
    assert capsys.readouterr().err == told * again
    cause = first_cause(tmp_path, {0: Exit.USER}, None)
    assert (cause.code, cause.mistake) == (Exit.USER, not again)


def test_ranks_are_restarted_though_the_time_of_the_failure_cannot_be_recorded(tmp_path, monkeypatch):
    """On a full disk; with several hosts the error had ended the run on all of them."""
    deciding = Restarts(tmp_path, 3, lambda: False, lambda own: own)
    monkeypatch.setattr(files, "_write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(Path, "write_text", files._write_text)
    (tmp_path / FAILED_AT).touch()  # of an earlier failure, and so not the time of this one
    assert deciding.again({0: -9}, 1, None)
    assert deciding.meet_again("host0:29400")
    assert not (tmp_path / FAILED_AT).exists()


@pytest.mark.parametrize("may_leave", [False, True])
def test_a_host_that_is_the_first_to_fail_twice_leaves_a_run_that_can_continue(tmp_path, paused, may_leave):
    causes = []
    deciding = Restarts(tmp_path, 99, lambda: False, lambda own: causes.pop() or own, may_leave=may_leave)

    def again(elsewhere=None):
        causes.append(elsewhere)
        (tmp_path / HAS_SAVED).unlink(missing_ok=True)
        return deciding.again({1: -9}, 1, None)

    another = Cause("rank 3 was killed", 1)
    assert [again(), again(another), again(another)] == [True] * 3
    assert deciding.left is None
    assert again() is not may_leave
    assert (deciding.left is not None) is may_leave


def test_only_a_host_without_the_meeting_place_may_leave_and_only_if_fewer_are_enough():
    def may_leave(endpoint, least):
        return Nodes(count=2, least=least, endpoint=endpoint).can_continue_without_this_host()

    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # TEST-NET-1 of RFC 5737: nobody's
    assert not is_here("no such host.invalid")
    assert may_leave("192.0.2.1:29400", 1)
    assert not may_leave("192.0.2.1:29400", 2)
    assert not may_leave("192.0.2.1:29400", 0)
    assert not may_leave("127.0.0.1:29400", 1)


class Shared(dict):
    """A store of two launchers."""

    get = dict.__getitem__

    def set(self, key, value):
        self[key] = value

    def compare_set(self, key, expected, value):
        self.setdefault(key, value)

    def check(self, keys):
        return all(key in self for key in keys)


def of_host_1(cause):
    """Return a store in which the other launcher has left its cause, earlier than any of this one."""
    store = Shared()
    store.set("cause/1", json.dumps([1.0, attrs.asdict(cause)]))
    return store


def test_a_launcher_whose_ranks_only_noticed_names_the_cause_on_another_host():
    echo, killed = Cause("rank 0 failed: connection closed", 1, echo=True), Cause("rank 3 was killed", 1)
    assert first_of_all(echo, of_host_1(killed), 0, 2) == killed
    assert first_of_all(killed, of_host_1(killed), 0, 2) == killed


def test_a_hang_is_blamed_on_the_host_whose_rank_the_others_wait_for():
    """The host that was the first to look had named itself, and after two hangs left the run."""
    waits = Cause("no rank goes on, all wait for others", Exit.HUNG, echo=True)
    hung, lost = Cause("rank 1 hung", Exit.HUNG), Cause("rank 0 failed: connection closed", 1, echo=True)
    assert first_of_all(hung, of_host_1(waits), 0, 2) == hung
    assert first_of_all(waits, of_host_1(hung), 0, 2) == hung
    assert first_of_all(lost, of_host_1(waits), 0, 2) == waits  # the end of ranks that hung, and not why
    assert first_of_all(waits, of_host_1(lost), 0, 2) == waits


def test_a_launcher_that_ends_the_run_waits_until_the_others_know_why(monkeypatch):
    """It may serve the store, and they would wait ten minutes for it to come back."""
    store, killed, slept = Shared(), Cause("rank 3 was killed", 1), []
    assert announced_end(store, 1) is None

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            assert announced_end(store, 1) == killed

    monkeypatch.setattr(cause_of_all_hosts.time, "sleep", sleep)
    announce_end(killed, store, 0, 2)
    assert len(slept) == 3
    announce_end(Cause("rank 0 failed: connection closed", 1, echo=True), store, 1, 2)
    assert announced_end(store, 0) == killed
