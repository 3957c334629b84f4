"""Ranks whose processes do not end after the run: bounded, named, and without another exit code."""

import multiprocessing
import time

import attrs
import pytest
from command import nanotrain
from test_run import SMALL

from nanotrain_core.errors import Exit
from nanotrain_core.launch.rank_processes import RankProcesses, StartedRank
from nanotrain_core.launch.worker import Job

STAYS = """
import threading, time
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    what: str

def build(config):
    import torch.distributed as dist
    from nanotrain_core.contracts import Monitor

    destroy = dist.destroy_process_group

    def never(group=None):
        if group is None:
            time.sleep(1e5)
        destroy(group)

    class Stays(Monitor):
        def on_end(self, report):
            if dist.get_rank() != 1:
                return
            if config.what == "thread":
                threading.Thread(target=never).start()
            else:
                dist.destroy_process_group = never

    return Stays()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="stays", config=Config, factory=f"{__name__}:build", summary="stays"))
"""


def in_processes(*seconds, patience):
    """Return ranks that end after so many seconds."""
    processes = RankProcesses(Job(recipe="none"), patience)
    for local, each in enumerate(seconds):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(each,))
        process.start()
        ours, _ = multiprocessing.Pipe()
        processes._ranks[local] = StartedRank(process, ours, number=str(4 + local), ends="done")
    return processes, [rank.process for rank in processes._ranks.values()]


def test_a_rank_that_does_not_end_after_the_run_is_named_and_killed(capsys):
    ranks, (ends, stays) = in_processes(0.1, 1000, patience=0.6)
    began = time.monotonic()
    ranks.end()
    assert 0.5 < time.monotonic() - began < 10
    assert (ends.exitcode, stays.exitcode) == (0, -9)
    said = f"rank 5 (process {stays.pid}) did not end within 0.6 seconds after the run: it is killed\n"
    assert capsys.readouterr().err == f"nanotrain: {said}"
    assert ranks._ranks == {}


def test_without_a_hang_timeout_any_time_is_waited(capsys):
    ranks, (slow,) = in_processes(0.5, patience=0.0)
    ranks.end()
    assert slow.exitcode == 0
    assert capsys.readouterr().err == ""


def test_a_rank_that_tells_its_monitors_of_a_failure_is_not_killed_like_one_that_waits(tmp_path):
    """The launcher knows it by the id that its process has deleted."""
    ranks, (waits, tells) = in_processes(1000, 0.6, patience=0.0)
    ranks.job = attrs.evolve(ranks.job, scratch=str(tmp_path))
    for rank in ranks._ranks.values():
        rank.ends = None
    (tmp_path / "pid-4").touch()
    began = time.monotonic()
    ranks.end_after_failure(seconds=0.2)
    assert 0.5 < time.monotonic() - began < 10
    assert waits.exitcode in (-9, -15)  # killed right after SIGTERM
    assert tells.exitcode == 0


LOSES = """
import os, signal, time
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.contracts import Monitor

@attrs.define(frozen=True, kw_only=True)
class Config:
    pass

class Loses(Monitor):
    def __init__(self, config):
        pass

    def on_start(self, run):
        self.run = run

    def on_step(self, report):
        if report.step == 2 and self.run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 2:
            time.sleep(1000)

    def on_end(self, report):
        time.sleep(4)
        (self.run.folder / "told").write_text(report.reason)

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="loses", config=Config, factory=f"{__name__}:Loses", summary="loses"))
"""


def test_when_another_rank_is_killed_the_monitors_of_one_that_waits_are_told_and_take_their_time(tmp_path):
    """It was killed after 3 seconds, and an alert was never sent."""
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "loses.py").write_text(LOSES)
    words = ["run", "small.toml", "--nproc", "2", "--plugin", "loses.py", "--folder", "here"]
    ended = nanotrain(*words, "--set", 'monitor.2.use="loses"', cwd=tmp_path)
    assert ended.code == Exit.FAILED
    assert "rank 1 was killed by SIGKILL" in ended.err
    assert (tmp_path / "here" / "told").read_text() == "failed"


def run_that_stays(tmp_path, what):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "stays.py").write_text(STAYS)
    words = ["run", "small.toml", "--nproc", "2", "--plugin", "stays.py", "--set", "run.hang_timeout=1.6"]
    return nanotrain(*words, "--set", f'monitor.2={{use="stays", what="{what}"}}', cwd=tmp_path)


@pytest.mark.full
def test_a_thread_that_never_ends_does_not_keep_the_run(tmp_path):
    """The launcher waited for its process without a limit, and said nothing."""
    ended = run_that_stays(tmp_path, "thread")
    assert ended.code == Exit.DONE, ended.err
    assert "did not end within 8 seconds after the run: it is killed" in ended.err
    assert ended.err.count("nanotrain: rank 1 (process ") == 1


@pytest.mark.full
def test_process_groups_whose_end_hangs_are_a_hang(tmp_path):
    """The watchdog had ended before, and nothing noticed."""
    ended = run_that_stays(tmp_path, "groups")
    assert ended.code == Exit.HUNG, ended.err
    assert "rank 1 hung: no progress for 1.6 seconds" in ended.err
    assert "in never" in ended.err
