"""Ranks that srun or torchrun started name the one that is gone, soon, and all the same one."""

import os
import signal
import socket
import subprocess
import threading
import time
from unittest import mock

import pytest
from command import COMMAND, finish
from test_join import free_port, srun
from test_run import SMALL
from torch.distributed import TCPStore

from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.launch import peers
from nanotrain_core.launch.cause import AttemptEnded
from nanotrain_core.launch.peers import Peers, watching_peers

CLOSED = RuntimeError("[..gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:41235")


@pytest.fixture
def three():
    """Return three ranks that beat in one process, twenty times a second."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Peers(store, rank, 3, interval=0.05, linger=1.0) for rank in range(3)]
    yield ranks
    for each in reversed(ranks):
        each.stop()


def kill(rank):
    """End its thread as a kill would: no word."""
    rank.done.set()
    rank.join()


def test_who_notices_that_a_connection_was_closed_learns_which_rank_is_gone(three):
    time.sleep(0.2)
    kill(three[2])
    for rank in three[:2]:
        first = rank.failed(CLOSED)
        assert str(first).startswith(
            f"rank 2 on {socket.gethostname()} (process {os.getpid()}) is gone: no sign of it for "
        )
        assert first.exit_code == Exit.FAILED


def test_a_rank_that_says_why_it_fails_is_the_first_cause_with_its_code(three):
    assert three[1].failed(CheckpointError("no space left in /data")) is None
    first = three[2].failed(CLOSED)
    assert str(first) == f"rank 1 on {socket.gethostname()} failed: no space left in /data"
    assert first.exit_code == CheckpointError.exit_code
    assert str(three[0].failed(CLOSED)) == str(first)


@pytest.mark.parametrize(
    "problem", [ConnectionResetError("Connection reset by peer"), CheckpointError("Broken pipe")]
)
def test_a_rank_whose_own_connection_was_closed_waits_for_no_other_cause(three, problem):
    began = time.monotonic()
    assert three[1].failed(problem) is None
    assert time.monotonic() - began < 1.0  # the linger; a beat takes 0.05 s
    assert str(three[0].failed(CLOSED)).startswith(f"rank 1 on {socket.gethostname()} failed: ")


def test_a_rank_that_has_come_to_its_end_is_not_taken_for_dead(three):
    three[2].stop()
    assert three[1].failed(CLOSED) is None  # whoever it was beats again, or has ended
    assert f"rank 1 on {socket.gethostname()} failed: RuntimeError: [..gloo" in str(three[0].failed(CLOSED))


def test_rank_0_waits_at_its_end_for_ranks_that_hear_of_it_late():
    """One that was held up for 5 seconds, and then had slow monitors, ended as if rank 0 was lost."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = Peers(store, 0, 2, interval=0.02, linger=0.1)
    ending = threading.Thread(target=first.stop)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    late = Peers(store, 1, 2, interval=0.02, linger=0.1)
    ending.join(5)
    late.join(5)
    assert not ending.is_alive()
    assert not late.is_alive()
    late.store = mock.Mock(compare_set=mock.Mock(side_effect=RuntimeError("the store is gone")))
    assert late.failed(OSError("no space left")) is None  # that is why, and not that rank 0 has ended


@pytest.mark.parametrize(("problem", "heard"), [(SystemExit(3), True), (KeyboardInterrupt(), False)])
def test_others_hear_of_a_rank_that_exits_in_the_middle_of_the_run(problem, heard):
    """They waited in their collective: a rank that has ended is not missed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(type(problem)), watching_peers(store, 1, 2):
        raise problem
    assert store.check(["peers/first"]) == heard
    assert store.check(["peers/ended/1"])


def test_a_rank_that_waits_for_a_silent_one_is_ended_by_its_thread(three):
    """As in an NCCL collective, which does not return."""
    with mock.patch.object(peers.os, "_exit") as ended, mock.patch.object(peers.log, "say") as said:
        for each in three:
            each.silence = 0.3
        kill(three[1])
        for each in (three[0], three[2]):
            each.join(10)
        assert [call.args for call in ended.call_args_list] == [(Exit.FAILED,)] * 2
        assert all("rank 1 on " in call.args[0] for call in said.call_args_list)


def test_a_rank_that_tells_its_monitors_is_not_ended_meanwhile_and_names_the_one_that_is_gone(three):
    """An alert takes longer than the end of an attempt."""
    waits, asked = three[0], threading.Event()
    waits.linger, waits.interrupt, waits.tells = 0.1, asked.set, asked.is_set
    with mock.patch.object(peers.os, "_exit") as ended:
        assert three[1].failed(CheckpointError("no space left")) is None
        assert asked.wait(10)
        time.sleep(0.5)
        assert "failed: no space left" in str(waits.failed(AttemptEnded("it was interrupted")))
        waits.join(10)
    assert waits.is_alive() is ended.called is False


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_under_srun_the_rank_that_was_killed_is_named(tmp_path, victim):
    """gloo named an address, or the ranks waited for 240 seconds."""
    (tmp_path / "small.toml").write_text(SMALL)
    port, processes = free_port(), []
    for rank in range(2):
        environment = {**os.environ, **{key: str(value) for key, value in srun(rank, port).items()}}
        command = [*COMMAND, "run", "small.toml", "--folder", "here", "--set", "run.steps=100000"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
    next(line for line in processes[0].stdout if line.startswith("step=5/"))
    began = time.monotonic()
    processes[victim].send_signal(signal.SIGKILL)
    left = finish(processes[1 - victim])
    finish(processes[victim])
    assert time.monotonic() - began < 60
    assert left.code == Exit.FAILED
    named = f"rank 1 on {socket.gethostname()} (process {processes[1].pid}) is gone"
    assert (named if victim else "rank 0, or its host, is gone: the store where the ranks met") in left.err
    assert "Traceback" not in left.err
