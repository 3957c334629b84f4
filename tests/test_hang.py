"""Who is named when a run makes no progress, and that it goes on after a restart."""

import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from command import begin, nanotrain
from test_restart import endpoint
from test_run import SMALL, metrics
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from nanotrain_core.errors import CheckpointError, DataError, Exit, SaveFailed
from nanotrain_core.launch import host_run
from nanotrain_core.launch.cause import Cause, error_text, first_cause, is_echo, leave_failure
from nanotrain_core.launch.signal_forwarding import SignalForwarder
from nanotrain_core.watch import hang
from nanotrain_core.watch.beats import read_beats
from nanotrain_core.watch.hang import Beat, Hang, HangWatch, Stuck, culprits
from nanotrain_core.watch.progress import Progress
from nanotrain_core.watch.watchdog import Watchdog

SLEEPS = 'Thread 0x00007f (most recent call first):\n  File "/x/loader.py", line 12 in read\n'
WAITS = (
    'Current thread 0x00007f (most recent call first):\n  File "/x/torch/distributed/d.py", line 3 in wait\n'
)


def stuck(rank, count, stack=SLEEPS, *, silent=False):
    return Stuck(Beat(rank, 1, count, 7, "data", False, 1), silent, stack)


@pytest.mark.parametrize(
    ("ranks", "guilty"),
    [
        ([stuck(0, 9, WAITS), stuck(1, 8), stuck(2, 9, WAITS)], [1]),
        ([stuck(0, 9, WAITS), stuck(1, 9), stuck(2, 9, WAITS)], [1]),
        ([stuck(0, 8, WAITS), stuck(1, 9, silent=True)], [1]),
        ([stuck(0, 8, WAITS), stuck(1, 9, WAITS)], [0]),
        ([stuck(0, 9, WAITS), stuck(1, 9, WAITS)], [0, 1]),
        ([stuck(0, 9)], [0]),
    ],
)
def test_the_rank_that_others_wait_for_is_named(ranks, guilty):
    assert [one.beat.rank for one in culprits(ranks)] == guilty


def test_ranks_may_end_while_the_launcher_looks(tmp_path):
    """A file that is listed and gone when it is opened is that of a rank that has just ended."""
    watch, forwarder = HangWatch(tmp_path, None, timeout=60), SignalForwarder(tmp_path, grace=60)
    (tmp_path / "pid-0").write_text(str(os.getpid()))
    for name in ("pid-1", "beat-1.json"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
    watch._look(time.monotonic())
    assert watch.hang is None
    forwarder.received = signal.SIGCONT  # harmless
    forwarder._forward()
    assert forwarder._told == {os.getpid()}


def test_the_place_is_the_innermost_frame_of_the_main_thread():
    other = 'Current thread 0x1 (most recent call first):\n  File "/x/beat.py", line 1 in run\n\n'
    assert stuck(0, 1, other + SLEEPS).where == "/x/loader.py:12 in read"
    assert not stuck(0, 1, SLEEPS).waits
    assert stuck(0, 1, WAITS).waits


HANGS = """
import os, signal, time
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    how: str

def build(config):
    from nanotrain_core.contracts import Monitor

    class Hangs(Monitor):
        def on_start(self, run):
            self.rank = run.rank

        def on_step(self, report):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and self.rank == 1 and report.step == 5:
                os.kill(os.getpid(), signal.SIGSTOP) if config.how == "stopped" else time.sleep(1e5)

    return Hangs()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="hangs", config=Config, factory=f"{__name__}:build", summary="hangs"))
"""


@pytest.mark.parametrize("how", ["stopped", pytest.param("sleeping", marks=pytest.mark.full)])
def test_a_rank_that_hangs_is_named_and_the_run_goes_on(tmp_path, how):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["run", "small.toml", "--nproc", "2", "--folder", "here", "--plugin", "hangs.py"]
    words += ["--set", f'monitor.2={{use="hangs", how="{how}"}}', "--set", "run.hang_timeout=4"]
    ended = nanotrain(*words, "--max-restarts", "1", cwd=tmp_path)
    assert ended.code == Exit.DONE
    lines = ended.err.splitlines()
    assert lines[0] == "nanotrain: rank 1 hung: no progress for 4 seconds"
    if how == "sleeping":
        assert re.search(r"rank 1 is in step 5, monitors, at \S+hangs.py:\d+ in on_step$", lines[1])
        assert "hangs.py" in "".join(lines[3:])
    else:
        assert "rank 1 is silent, stopped or stuck outside Python; it was last seen in step" in lines[1]
    assert re.search(r"rank 0 is in step 5, \w.*\(waits for others\)", lines[2])
    assert lines[-1].endswith("restarting (1 of 1) from the newest checkpoint")
    assert sorted(path.name for path in (tmp_path / "here").glob("stacks/*/*")) == [
        "rank-0.txt",
        "rank-1.txt",
    ]
    assert [row["first_step"] for row in metrics(tmp_path / "here", "start")] == [0, 3]


@pytest.mark.full
def test_on_several_hosts_each_launcher_names_the_rank_that_hangs_and_keeps_the_stacks_of_its_own(tmp_path):
    """The other host ended with code 5 and without a word, and there were no stacks."""
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["run", "small.toml", "--nnodes", "2", "--rdzv-endpoint", endpoint(), "--folder", "here"]
    words += ["--plugin", "hangs.py", "--set", 'monitor.2={use="hangs", how="sleeping"}']
    hosts = [begin(*words, "--set", "run.hang_timeout=4", cwd=tmp_path) for _ in range(2)]
    outcomes = [host.end() for host in hosts]
    assert [outcome.code for outcome in outcomes] == [Exit.HUNG] * 2
    told = "rank 1 hung: no progress for 4 seconds"
    assert [outcome.err.count(f"nanotrain: {told}\n") for outcome in outcomes] == [1, 1]
    kept = [path.name for path in (tmp_path / "here").glob("stacks/*/*")]
    assert sorted(kept) == ["rank-0.txt", "rank-1.txt"]
    logged = [json.loads(line) for line in (tmp_path / "here/run.log.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in logged if line["event"] == told] == [None, None]


@pytest.mark.parametrize(("seen_here", "told"), [(True, ""), (False, "nanotrain: rank 1 hung\n")])
def test_a_hang_that_another_host_has_detected_is_told(capsys, seen_here, told):
    seen = Hang("rank 1 hung" if seen_here else "no rank goes on, all wait for others", waits=not seen_here)
    assert host_run.end(Cause("rank 1 hung", Exit.HUNG), seen) == Exit.HUNG
    assert capsys.readouterr().err == told


@pytest.mark.full
def test_without_restarts_a_hang_ends_the_run_with_its_own_code(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["run", "small.toml", "--nproc", "2", "--plugin", "hangs.py", "--set", "run.hang_timeout=4"]
    ended = nanotrain(*words, "--set", 'monitor.2={use="hangs", how="sleeping"}', cwd=tmp_path)
    assert ended.code == Exit.HUNG
    assert ended.err.count("rank 1 hung") == 1


def test_a_rank_that_nobody_watches_ends_itself_with_its_stacks(tmp_path):
    child = os.fork()
    if child == 0:
        progress = Progress()
        progress.note("data", 3)
        os.dup2(os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT), 2)
        Watchdog(progress, 0, timeout=0.5, folder=tmp_path, scratch=None)
        time.sleep(60)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == Exit.HUNG
    assert "in test_a_rank_that_nobody_watches" in (tmp_path / "stacks/rank-0.txt").read_text()


def test_a_hang_report_says_where_the_last_collectives_are_if_there_are_any(tmp_path, capsys):
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    (folder / "collectives").mkdir(parents=True)
    watch = HangWatch(scratch, folder, timeout=60)
    watch._end_all([])
    assert "collectives" not in capsys.readouterr().err
    (folder / "collectives/rank-0").touch()
    watch._end_all([])
    assert f"`torchfrtrace {folder}/collectives --prefix rank-` compares them" in capsys.readouterr().err


def test_each_rank_leaves_its_last_heartbeat_in_the_run_folder_once_it_trains(tmp_path):
    """The launcher's folder is gone with its host: nothing said where its ranks had been."""
    progress, path = Progress(), tmp_path / "heartbeats/rank-3.json"
    (tmp_path / "scratch").mkdir()
    watchdog = Watchdog(progress, 3, timeout=60, folder=tmp_path, scratch=tmp_path / "scratch")
    watchdog.stop()
    assert not path.parent.exists()  # of a run that is refused before it trains
    progress.note("data", 12)
    watchdog = Watchdog(progress, 3, timeout=60, folder=tmp_path, scratch=tmp_path / "scratch")
    watchdog.stop()
    watchdog.keeping.join()
    beat = json.loads(path.read_text())
    assert (beat["rank"], beat["step"], beat["phase"]) == (3, 12, "data")
    assert (beat["host"], beat["pid"]) == (socket.gethostname(), os.getpid())
    assert abs(beat["time"] - path.stat().st_mtime) < 60


def test_a_file_system_that_stalls_stalls_no_heartbeat_of_the_launcher(tmp_path, monkeypatch):
    """Else the launcher would take a rank for hung that trains on."""
    progress, scratch, go_on = Progress(), tmp_path / "scratch", threading.Event()
    scratch.mkdir()
    progress.note("data", 12)
    monkeypatch.setattr(Watchdog, "_keep", lambda watchdog: go_on.wait())
    watchdog = Watchdog(progress, 3, timeout=0.5, folder=tmp_path, scratch=scratch)
    ticks, until = set(), time.monotonic() + 60
    while len(ticks) < 3 and time.monotonic() < until:
        ticks |= {beat["tick"] for beat in read_beats(scratch)}
    assert len(ticks) >= 3
    assert watchdog.keeping.is_alive()
    go_on.set()
    watchdog.stop()


@pytest.mark.parametrize(
    ("stacks", "counts", "waits"),
    [
        ((WAITS, SLEEPS), (9, 9), False),
        ((WAITS, WAITS), (9, 9), True),
        ((WAITS, WAITS), (9, 8), True),  # the one that is behind may wait for a rank of another host
    ],
)
def test_a_hang_in_which_all_ranks_of_a_host_wait_may_come_from_another_host(
    tmp_path, monkeypatch, stacks, counts, waits
):
    monkeypatch.setattr(hang.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hang, "kill", lambda pids, number: None)
    watch, beats = HangWatch(tmp_path, None, timeout=60), []
    for rank, (stack, count) in enumerate(zip(stacks, counts, strict=True)):
        (tmp_path / f"stacks-{rank}.txt").write_text(stack)
        beats.append(Beat(rank, 1, count, 7, "data", False, 1))
        watch._ticks[rank] = (1, 0.0)
    watch._end_all(beats)
    cause = first_cause(tmp_path, {0: -9, 1: -9}, watch.hang)
    assert (cause.code, cause.echo) == (Exit.HUNG, waits)


def leave(scratch, rank, *, code=1, echo=False, trace="Traceback\n", text="boom", time=0.0):
    report = {"rank": rank, "time": time, "text": text, "echo": echo, "trace": trace, "code": code}
    (scratch / f"failure-{rank}.json").write_text(json.dumps(report))


ENDED = {"code": Exit.PREEMPTED, "trace": None, "text": "stopped by SIGTERM"}


EXITED = "rank 1 exited during the run with exit code 0, without reporting an error"


@pytest.mark.parametrize(
    ("reports", "codes", "said", "code"),
    [
        ({0: ENDED}, {1: -9}, "rank 1 was killed by SIGKILL", Exit.FAILED),
        ({0: ENDED, 1: {"time": 1.0}}, {1: 1}, "rank 1 failed: boom", Exit.FAILED),
        ({0: ENDED, 1: {"echo": True}}, {0: 75}, "stopped by SIGTERM", Exit.PREEMPTED),
        ({0: {"echo": True}}, {1: -11}, "rank 1 was killed by SIGSEGV", Exit.FAILED),
        ({0: {}, 1: {"trace": None, "code": 3, "text": "gone"}}, {0: 1}, "gone", Exit.DIVERGED),
        ({0: {"trace": None, "echo": True}}, {1: -9}, "rank 1 was killed by SIGKILL", Exit.FAILED),
        ({0: {"trace": None, "text": "unsaved"}}, {1: -9}, "rank 1 was killed by SIGKILL", Exit.FAILED),
        ({0: {"trace": None, "echo": True}}, {0: 2}, "rank 0 failed: boom", Exit.FAILED),
        (
            {},
            {2: 4},
            "rank 2 exited during the run with exit code 4, without reporting an error",
            Exit.FAILED,
        ),
        (
            {0: {"echo": True}},
            {1: 9},
            "rank 1 exited during the run with exit code 9, without reporting an error",
            Exit.FAILED,
        ),
        (
            {0: {"echo": True}, 1: None},
            {0: 1, 1: 0},
            EXITED,
            Exit.FAILED,
        ),
        ({0: {}, 1: None}, {0: 1, 1: 0}, "rank 0 failed: boom", Exit.FAILED),
        ({0: {"echo": True}, 2: None}, {1: 0}, EXITED, Exit.FAILED),
        ({0: {"trace": None, "code": 2, "text": "a mistake"}}, {1: -6}, "a mistake", Exit.USER),
        ({0: {"echo": True}}, {1: -6}, "rank 1 was killed by SIGABRT", Exit.FAILED),
    ],
)
def test_the_first_cause_is_told_and_not_what_followed_from_it(tmp_path, reports, codes, said, code):
    for rank, report in reports.items():
        (tmp_path / f"pid-{rank}").write_text("1")
        if report is not None:
            leave(tmp_path, rank, **report)
    cause = first_cause(tmp_path, codes, None)
    assert (cause.text, cause.code) == (said, code)
    assert first_cause(tmp_path, codes, Hang("rank 1 hung", waits=False)).code == Exit.HUNG


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "NCCL communicator was aborted on rank 1.",
        "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:147] no error",
        "wait timeout after 60000ms, keys: /default_pg/0//cpu//1/0",
        "Timeout waiting for key: default_pg/0//cpu//1/0 after 60000 ms",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Failed to send, sent 0 bytes. Connection was likely closed.",
    ],
)
def test_an_error_that_only_reports_a_lost_rank_is_no_cause(tmp_path, text):
    assert all(is_echo(kind(text)) for kind in (RuntimeError, DistBackendError, DistNetworkError))
    assert leave_failure(tmp_path, 0, DistStoreError(text))
    cause = first_cause(tmp_path, {0: 1, 1: -9}, None)
    assert (cause.text, cause.echo) == ("rank 1 was killed by SIGKILL", False)


@pytest.mark.parametrize(
    ("problem", "said", "code"),
    [
        (SaveFailed("step 8 was not saved: [Errno 32] Broken pipe"), "step 8 was not saved", Exit.UNSAVED),
        (CheckpointError("store.example does not answer: Connection reset by peer"), "store.ex", Exit.USER),
        (ConnectionResetError(104, "Connection reset by peer"), "rank 0 failed: ConnectionRe", Exit.FAILED),
    ],
)
def test_an_error_of_its_own_with_the_words_of_a_lost_connection_is_the_cause(tmp_path, problem, said, code):
    assert not leave_failure(tmp_path, 0, problem)
    cause = first_cause(tmp_path, {0: code, 1: 1}, None)
    assert cause.text.startswith(said)
    assert (cause.code, cause.echo, cause.mistake) == (code, False, code != Exit.FAILED)
    assert ("ConnectionResetError" in cause.trace) is (code == Exit.FAILED)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (KeyError("layers.0"), "KeyError: 'layers.0'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (DataError("corpus: no such file"), "corpus: no such file"),
    ],
)
def test_an_error_that_nobody_meant_is_told_with_its_kind(problem, text):
    assert error_text(problem) == text
