"""What survives a failure: restarts go on from the last checkpoint, and several hosts can meet."""

import contextlib
import json
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from command import begin, finish, nanotrain, start
from safetensors.torch import load_file
from test_run import SMALL, metrics
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, registry

from nanotrain_core.errors import Exit, LaunchError
from nanotrain_core.launch import rendezvous as meeting
from nanotrain_core.launch.hosts import Nodes, rendezvous

DIES_ONCE = """
HOLD = 0  # seconds that rank 0 lives on and hears nothing of it
import os, signal, time
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    pass

def build(config):
    from nanotrain_core.contracts import Monitor

    class DiesOnce(Monitor):
        def on_start(self, run):
            self.run = run

        def on_step(self, report):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and report.step == 5:
                time.sleep(self.run.rank == 0 and HOLD)
                os.kill(os.getpid(), signal.SIGKILL if self.run.rank == 1 else 0)

    return DiesOnce()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="dies_once", config=Config, factory=f"{__name__}:build", summary="dies"))
"""


def write_small(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)


def test_a_restarted_run_goes_on_from_its_checkpoint_and_ends_with_the_same_bytes(tmp_path):
    write_small(tmp_path)
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    words = ["run", "small.toml", "--nproc", "2"]
    nanotrain(*words, "--folder", "whole", cwd=tmp_path)
    killed = [*words, "--folder", "killed", "--plugin", "dies.py", "--set", 'monitor.2.use="dies_once"']
    ended = nanotrain(*killed, "--max-restarts", "1", cwd=tmp_path)
    assert ended.code == Exit.DONE
    told = "nanotrain: rank 1 was killed by SIGKILL; restarting (1 of 1) from the newest checkpoint\n"
    assert ended.err == told
    assert [row["first_step"] for row in metrics(tmp_path / "killed", "start")] == [0, 3]
    whole, again = (
        load_file(tmp_path / folder / "checkpoints/step-00000006.safetensors")
        for folder in ("whole", "killed")
    )
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def endpoint():
    """Return where two hosts of one run may meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.full
def test_two_hosts_meet_at_the_rendezvous(tmp_path):
    write_small(tmp_path)
    words = ["run", "small.toml", "--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", endpoint()]
    hosts = [begin(*words, "--folder", "here", cwd=tmp_path) for _ in range(2)]
    outcomes = [host.end() for host in hosts]
    assert [(o.code, o.err) for o in outcomes] == [(Exit.DONE, "")] * 2
    assert sum("2 ranks on cpu" in o.out for o in outcomes) == 1
    assert len(metrics(tmp_path / "here")) == 6


@pytest.mark.parametrize("hold", [0, pytest.param(4, marks=pytest.mark.full)])
def test_two_hosts_restart_together_when_a_rank_of_one_dies(tmp_path, hold):
    """Rank 0's host, too, which counts no failure of its own when its rank still lives."""
    write_small(tmp_path)
    (tmp_path / "dies.py").write_text(DIES_ONCE.replace("HOLD = 0", f"HOLD = {hold}"))
    words = ["run", "small.toml", "--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", endpoint()]
    words += ["--folder", "here", "--plugin", "dies.py", "--set", 'monitor.2.use="dies_once"']
    hosts = [begin(*words, "--max-restarts", "3", cwd=tmp_path) for _ in range(2)]
    outcomes = [host.end() for host in hosts]
    assert [outcome.code for outcome in outcomes] == [Exit.DONE] * 2
    said = "".join(o.err for o in outcomes)
    assert "rank 1 was killed by SIGKILL; restarting (1 of 3)" in said
    assert "another host has joined" not in said
    starts = [row["first_step"] for row in metrics(tmp_path / "here", "start")]
    assert starts[:2] == [0, 3]
    assert metrics(tmp_path / "here", "end")[-1]["reason"] == "done"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [("SIGTERM", Exit.PREEMPTED), ("SIGINT", Exit.INTERRUPTED)],
)
def test_a_signal_ends_the_wait_for_another_host(tmp_path, number, code):
    write_small(tmp_path)
    at = endpoint()
    host = start("run", "small.toml", "--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", at, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not listens(at) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    host.send_signal(signal.Signals[number])
    ended = finish(host, timeout=20)
    assert (ended.code, ended.err) == (code, "")


def test_where_nobody_serves_the_meeting_is_told(monkeypatch, tmp_path):
    def refuse(parameters):
        raise RendezvousConnectionError("nobody there")

    monkeypatch.setattr(registry, "get_rendezvous_handler", refuse)
    with pytest.raises(LaunchError, match=r"hosts of the run cannot meet at away:29400: nobody there"):
        rendezvous(Nodes(count=2, endpoint="away:29400"), tmp_path)


def test_a_port_that_another_program_holds_is_told(monkeypatch, tmp_path):
    """Torch waited for its answer without end."""
    for limit in ("PATIENT", "_SOON"):
        monkeypatch.setattr(meeting, limit, timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = f"^port {port} of 127.0.0.1 is held by another program: choose another --rdzv-endpoint$"
        with pytest.raises(LaunchError, match=text):
            rendezvous(Nodes(count=2, endpoint=f"127.0.0.1:{port}"), tmp_path)
    assert not meeting.is_held_by_another_program("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as forwarder:  # to a host that does not listen yet
        threading.Thread(target=close_each, args=(forwarder,), daemon=True).start()
        assert not meeting.is_held_by_another_program("127.0.0.1", forwarder.getsockname()[1])
        forwarder.shutdown(socket.SHUT_RDWR)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not meeting.is_held_by_another_program("127.0.0.1", store.port)


def close_each(server):
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def test_two_runs_at_one_endpoint_do_not_mix(tmp_path, capsys):
    """A stranger's launcher had joined, differed, and ended a healthy run that waits for more hosts."""
    at = endpoint()
    mine, same, other = "small", "small", "large"
    met = [Nodes(count=3, least=1, endpoint=at, run_id=name) for name in (mine, same, other)]
    handlers = [rendezvous(met[0], tmp_path), rendezvous(met[1], tmp_path)]
    assert capsys.readouterr().err == ""
    handlers.append(rendezvous(met[2], tmp_path))
    said = capsys.readouterr().err
    assert said.startswith(f"nanotrain: {at} serves another run, {mine}; this is {other}: ")
    assert "need the same run.name, or the same --rdzv-id" in said
    assert [handler.get_run_id() for handler in handlers] == [mine, mine, other]


@pytest.mark.full
def test_two_signals_end_a_launcher_that_nobody_answers(tmp_path):
    write_small(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        host = start(
            "run", "small.toml", "--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", at, cwd=tmp_path
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            for _ in range(2):  # within a second they would count as one
                time.sleep(2)
                host.send_signal(signal.SIGTERM)
            assert finish(host, timeout=20).code == Exit.PREEMPTED


def listens(at):
    """Return whether a host serves the place where they meet."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(at.rpartition(":")[2]))) == 0


@pytest.mark.full
@pytest.mark.parametrize("order", [("3", "0"), ("0", "3")])
def test_a_host_whose_run_another_one_ends_says_so_and_blames_no_mistake(tmp_path, order):
    """One launcher has no restarts left, the other has: it cannot go on alone, whoever serves the store."""
    write_small(tmp_path)
    last = 'os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0"'
    (tmp_path / "dies.py").write_text(DIES_ONCE.replace("self.run.rank == 1", last))
    at = endpoint()
    words = ["run", "small.toml", "--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", at]
    words += ["--folder", "here", "--plugin", "dies.py", "--set", 'monitor.2.use="dies_once"']
    words += ["--set", "run.timeout=60"]  # longer than a rank may wait for one that is gone
    hosts = []
    for most in order:
        hosts.append(start(*words, "--max-restarts", most, cwd=tmp_path))
        while not listens(at):
            time.sleep(0.1)
    began = time.monotonic()
    outcomes = [finish(host) for host in hosts]
    assert time.monotonic() - began < 55
    assert [outcome.code for outcome in outcomes] == [Exit.FAILED] * 2
    for outcome in outcomes:
        assert re.search(r"nanotrain: rank [01] was killed by SIGKILL\n", outcome.err)


def test_a_restart_that_sees_no_checkpoint_of_those_saved_is_refused(tmp_path):
    """Rank 0 may be on another host now, with a disk of its own: the run must not begin anew."""
    write_small(tmp_path)
    loses = "os.rename(self.run.folder / 'checkpoints', self.run.folder / 'elsewhere')"
    (tmp_path / "dies.py").write_text(
        DIES_ONCE.replace("time.sleep(self.run.rank == 0 and HOLD)", loses).replace("rank == 1", "rank == 0")
    )
    words = ["--folder", "here", "--plugin", "dies.py", "--set", 'monitor.2.use="dies_once"']
    ended = nanotrain("run", "small.toml", *words, "--max-restarts", "1", cwd=tmp_path)
    assert ended.code == Exit.USER
    assert "restarting (1 of 1) from the newest checkpoint" in ended.err
    assert "there is no checkpoint in here to resume from" in ended.err
    assert [row["first_step"] for row in metrics(tmp_path / "here", "start")] == [0]


def test_resuming_from_an_older_step_leaves_the_later_branch_aside(tmp_path):
    write_small(tmp_path)
    nanotrain("run", "small.toml", "--folder", "a", "--set", "checkpoint.every=1", cwd=tmp_path)
    words = (
        "--resume",
        "3",
        "--set",
        "checkpoint.every=1",
        "--set",
        "checkpoint.keep=2",
        "--set",
        "run.steps=5",
    )
    resumed = nanotrain("run", "small.toml", "--folder", "a", *words, cwd=tmp_path)
    assert resumed.code == Exit.DONE
    assert "checkpoints of an abandoned branch were set aside" in resumed.err
    kept = sorted(path.name for path in (tmp_path / "a/checkpoints").glob("*.safetensors"))
    assert kept == ["step-00000004.safetensors", "step-00000005.safetensors"]
    aside = sorted(path.name for path in (tmp_path / "a/checkpoints").glob("superseded-*/*"))
    assert aside == [f"step-{step:08d}.safetensors" for step in (4, 5, 6)]
    assert (tmp_path / "a/recipe-2.toml").exists()


@pytest.mark.full
def test_a_checkpoint_of_another_model_or_precision_is_refused_by_name(tmp_path):
    write_small(tmp_path)
    nanotrain("run", "small.toml", "--folder", "a", cwd=tmp_path)
    nanotrain("run", "small.toml", "--folder", "narrow", "--set", "precision.use=bf16", cwd=tmp_path)
    for folder, change, text in (
        ("a", "model.norm_eps=0.1", "another model: model.norm_eps is 1e-05 there and 0.1 in this recipe"),
        ("a", "model.tied=true", "model.tied is False there and True"),
        ("a", "optimizer.use=sgd", "it holds 'exp_avg' tensors, which this run has no place for"),
        ("narrow", "precision.use=fp32", "it holds 'master' tensors, which this run has no place for"),
    ):
        words = ("--folder", folder, "--resume", "--set", "run.steps=7", "--set", change)
        ended = nanotrain("run", "small.toml", *words, cwd=tmp_path)
        assert ended.code == Exit.USER, change
        assert text in ended.err
        assert not (tmp_path / folder / "recipe-2.toml").exists()  # it says what a resume has changed


def test_a_run_that_is_refused_at_its_start_hides_none_that_came_before(tmp_path):
    """``--resume auto`` began anew in its folder, and ``--resume`` found no checkpoint there."""
    write_small(tmp_path)
    assert nanotrain("run", "small.toml", cwd=tmp_path).code == Exit.DONE
    words = ("--weights", "runs/small", "--set", "model.norm_eps=0.1")
    assert nanotrain("run", "small.toml", *words, cwd=tmp_path).code == Exit.USER
    ended = nanotrain("run", "small.toml", "--resume", "auto", "--set", "run.steps=7", cwd=tmp_path)
    assert (ended.code, ended.err) == (Exit.DONE, "")
    assert "resumed after step 6" in ended.out


def test_ranks_with_different_data_are_refused(tmp_path):
    write_small(tmp_path)
    (tmp_path / "own.py").write_text(OWN_DATA)
    words = ("run", "small.toml", "--nproc", "2", "--plugin", "own.py", "--set", 'data.use="own"')
    ended = nanotrain(*words, "--set", "data.vocab=64", cwd=tmp_path)
    assert ended.code == Exit.USER
    assert ended.err.startswith("nanotrain: rank 1 has other data than rank 0: its fingerprint is 1, not 0")


OWN_DATA = """
import os
from nanotrain_core import hookimpl
from nanotrain_core.builtin.configs import SyntheticConfig
from nanotrain_core.component import Component

def build(config):
    from nanotrain_core.data.synthetic import Synthetic

    class Own(Synthetic):
        def meta(self):
            return {**super().meta(), "fingerprint": os.environ["RANK"]}

    return Own(config)

@hookimpl
def nanotrain_register_data(register):
    register(Component(name="own", config=SyntheticConfig, factory=f"{__name__}:build", summary="own"))
"""


def test_a_run_whose_gradients_stay_infinite_is_given_up(tmp_path):
    write_small(tmp_path)
    sgd = "optimizer={use='sgd', lr=1000.0, clip_norm=0.0}"
    words = ("--set", sgd, "--set", "run.steps=60", "--set", "model.activation='gelu'")
    ended = nanotrain("run", "small.toml", "--folder", "a", *words, cwd=tmp_path)
    assert ended.code == Exit.DIVERGED
    assert "the gradient norm was nan for 30 steps in a row" in ended.err
    steps = metrics(tmp_path / "a")
    assert any(row["skipped"] for row in steps)
    assert json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1])["reason"] == "failed"
