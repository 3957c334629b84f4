"""Ranks that torchrun or srun started join one another, or find out why they must not."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from random import Random

import pytest
from command import COMMAND, begin, finish, nanotrain
from test_run import SMALL, metrics
from torch.distributed import TCPStore

from nanotrain_core.errors import Exit, LaunchError
from nanotrain_core.launch import rendezvous
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.run.folder import RunFolder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(rank, port):
    places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    return {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def srun(rank, port):
    places = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": rank}
    return {
        **places,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def run_both(tmp_path, launcher, *words_of_rank):
    """Start two ranks, each with its own words, and return their outcomes."""
    (tmp_path / "small.toml").write_text(SMALL)
    port, running = free_port(), []
    for rank, words in enumerate(words_of_rank):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in launcher(rank, port).items():
                patch.setenv(name, str(value))
            running.append(begin("run", "small.toml", "--folder", "here", *words, cwd=tmp_path))
    return [each.end() for each in running]


@pytest.mark.parametrize("launcher", [pytest.param(torchrun, marks=pytest.mark.full), srun])
def test_two_started_processes_train_together(tmp_path, launcher):
    zero, one = run_both(tmp_path, launcher, (), ())
    assert (zero.code, zero.err, one.code, one.err) == (Exit.DONE, "", Exit.DONE, "")
    assert "2 ranks on cpu" in zero.out
    assert one.out == ""
    assert len(metrics(tmp_path / "here")) == 6


def without_port(rank, port):
    """As srun alone: the port follows from the job's number, and is taken where that is another's."""
    places = srun(rank, port)
    del places["MASTER_PORT"]
    return {**places, "SLURM_JOB_ID": int(port) - 20_000, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("stranger", ["silent", "a store"])
def test_a_port_that_another_program_has_is_passed_over(monkeypatch, stranger):
    """Rank 0 failed, and the others waited at the stranger's for ever."""
    monkeypatch.setattr(rendezvous, "_SOON", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        ports = rendezvous.candidates(free.getsockname()[1], named=False)
    if stranger == "silent":
        taken = socket.create_server(("127.0.0.1", ports[0]))
    else:
        taken = TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False)
    served = rendezvous.serve("127.0.0.1", ports, "ours")
    assert served.port in ports[1:]
    assert rendezvous.find("127.0.0.1", ports, "ours", 60).port == served.port
    with pytest.raises(LaunchError, match="rank 0 has not been found"):
        rendezvous.find("127.0.0.1", ports, "another", 0.5)
    with pytest.raises(
        LaunchError, match=f"port {ports[0]} of 127.0.0.1, where the ranks would meet, cannot"
    ):
        rendezvous.serve("127.0.0.1", ports[:1], "ours")
    del taken


@pytest.mark.full
@pytest.mark.parametrize("stranger", ["silent", "a store"])
def test_ranks_of_srun_pass_over_a_port_that_is_taken(tmp_path, monkeypatch, stranger):
    taken = None
    while taken is None:  # a port that a job's number may give
        with contextlib.suppress(OSError):
            taken = socket.create_server(("127.0.0.1", Random().randrange(21_000, 32_000)))
    port = taken.getsockname()[1]
    if stranger == "a store":
        taken.close()
        taken = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(sys.modules[__name__], "free_port", lambda: str(port))
    outcomes = run_both(tmp_path, without_port, (), ())
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(Exit.DONE, "")] * 2
    assert len(metrics(tmp_path / "here")) == 6
    del taken


@pytest.mark.full
def test_a_named_port_that_is_taken_is_told(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys.modules[__name__], "free_port", lambda: port)
        outcomes = run_both(tmp_path, srun, (), ("--set", "run.timeout=15"))
    assert [outcome.code for outcome in outcomes] == [Exit.USER] * 2
    assert f"port {port} of 127.0.0.1, where the ranks would meet, cannot be had" in outcomes[0].err
    assert "rank 0 has not been found at 127.0.0.1" in outcomes[1].err


def test_a_single_task_of_slurm_is_no_rank():
    """A run of several was one rank inside of `srun --pty bash`, without a word."""
    several = {name: str(value) for name, value in srun(0, "1").items()}
    shell = {**several, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert Ranks.joined(environment=shell) is None
    assert Ranks.joined(environment=several) == Ranks(0, 2, 0, 2, "srun")
    assert Ranks.joined("a:29400", several) is None
    one = {name: str(value) for name, value in torchrun(0, "1").items()}
    assert Ranks.joined("a:29400", one) == Ranks(0, 2, 0, 2, "torchrun")


@pytest.mark.full
def test_inside_a_shell_that_srun_has_started_all_ranks_of_the_recipe_train(tmp_path):
    """Its one task was taken for the only rank, without a word."""
    (tmp_path / "small.toml").write_text(SMALL)
    shell = {**srun(0, "1"), "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_TASKS_PER_NODE": 1}
    environment = {**os.environ, **{key: str(value) for key, value in shell.items()}}
    command = [*COMMAND, "run", "small.toml", "--folder", "here", "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    assert "2 ranks on cpu" in done.stdout


def test_another_number_of_ranks_than_the_launcher_s_is_refused(tmp_path, monkeypatch):
    """After a launcher had left its variables in the shell, --nproc was ignored."""
    (tmp_path / "small.toml").write_text(SMALL)
    left = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    for name, value in left.items():
        monkeypatch.setenv(name, str(value))
    done = nanotrain("run", "small.toml", "--folder", "here", "--nproc", "2", cwd=tmp_path)
    assert (done.code, (tmp_path / "here").exists()) == (Exit.USER, False)
    assert done.err.splitlines() == [
        "nanotrain: --nproc 2: by its environment this process is rank 0 of 1 that torchrun has started; "
        f"leave the option out, or start the ranks here after: unset {' '.join(left)}"
    ]


def test_with_an_endpoint_a_task_of_srun_is_a_launcher(tmp_path, monkeypatch):
    """One task a node, which starts the ranks there: as scripts of `nanotrain launch` do."""
    (tmp_path / "small.toml").write_text(SMALL)
    for name, value in srun(1, free_port()).items():
        monkeypatch.setenv(name, str(value))
    done = nanotrain("run", "small.toml", "--folder", "here", "--rdzv-endpoint", "away:29400", cwd=tmp_path)
    assert done.code == Exit.DONE, done.err
    (begun,) = metrics(tmp_path / "here", "start")
    assert begun["world_size"] == 1


@pytest.mark.full  # srun's processes join in the same way
def test_torchrun_itself_starts_ranks(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "nanotrain_core.cli", "run", "small.toml", "--folder", "here"]
    done = subprocess.run([*launcher, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    (start,) = metrics(tmp_path / "here", "start")
    assert start["world_size"] == 2
    assert json.loads((tmp_path / "here/.lock").read_text())["pid"] > 0


DIES_ONCE = """
import os
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.contracts import Monitor

@attrs.define(frozen=True, kw_only=True)
class Config:
    at: int = 2
    \"\"\"Steps after the first attempt began.\"\"\"

class DiesOnce(Monitor):
    every_step = True
    def __init__(self, config):
        self.config = config
    def on_start(self, run):
        self.first = run.first_step
    def on_step(self, report):
        if report.step == self.first + self.config.at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(9)

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="dies_once", config=Config, factory=f"{__name__}:DiesOnce", summary="dies"))
"""


@pytest.mark.full
@pytest.mark.parametrize(("at", "again", "ranks"), [(1, 3, 1), (4, 6, 2)])
def test_torchrun_starts_again_from_where_the_run_began_until_it_has_saved(tmp_path, at, again, ranks):
    """A run that goes on from another one's checkpoint must not begin anew because it died early."""
    (tmp_path / "small.toml").write_text(SMALL)
    monitors = f"""[[monitor]]\nuse = "jsonl"\n[[monitor]]\nuse = "dies_once"\nat = {at}\n"""
    (tmp_path / "dying.toml").write_text(SMALL + monitors)
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    ended = nanotrain("run", "small.toml", "--folder", "first", cwd=tmp_path)
    assert ended.code == Exit.DONE, ended.err
    (step,) = tmp_path.glob("first/checkpoints/step-00000003*")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    launcher += ["--nproc-per-node", str(ranks)]
    words = ["-m", "nanotrain_core.cli", "run", "dying.toml", "--plugin", "dies_once.py", "--folder", "here"]
    words += ["--resume", str(step), "--set", "run.steps=9"]
    done = subprocess.run([*launcher, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    assert [row["first_step"] for row in metrics(tmp_path / "here", "start")] == [3, again]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_torchrun_starts_again_without_counting_go_on_in_their_folder(tmp_path, ranks):
    """A host that joins or comes back makes it start all ranks again, and that is no restart to it."""
    (tmp_path / "small.toml").write_text(SMALL)
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True, "WORLD_SIZE": ranks}
    for steps in (3, 6):
        words = ["run", "small.toml", "--set", f"run.steps={steps}"]
        processes = []
        for rank in range(ranks):
            environment = {**torchrun(rank, agents.port), **agent, "LOCAL_WORLD_SIZE": ranks}
            environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env=environment, **pipes))
        outcomes = [finish(process) for process in processes]
        assert [(outcome.code, outcome.err) for outcome in outcomes] == [(Exit.DONE, "")] * ranks
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small"]
    assert [row["first_step"] for row in metrics(tmp_path / "runs/small", "start")] == [0, 3]


@pytest.mark.full
def test_ranks_with_different_recipes_are_told_so_before_they_train(tmp_path):
    for outcome in run_both(tmp_path, torchrun, (), ("--set", "optimizer.lr=0.5")):
        assert outcome.code == Exit.USER
        assert outcome.err.startswith("nanotrain: rank 1 on ")
        assert "the recipe's optimizer.lr is 0.5 there and 0.001 on rank 0" in outcome.err
        assert "Traceback" not in outcome.err
        assert "step=" not in outcome.out


@pytest.mark.full
def test_a_folder_in_use_is_told_on_every_rank_with_its_code(tmp_path):
    lock = RunFolder.claim("other", folder=str(tmp_path / "here"))
    for outcome in run_both(tmp_path, torchrun, (), ()):
        assert outcome.code == Exit.LOCKED
        assert "here is in use by another run" in outcome.err
    lock.release()


@pytest.mark.full
def test_ranks_with_different_words_are_told_so_before_they_train(tmp_path):
    """Only rank 0's would count, and which host has it is chance."""
    for outcome in run_both(tmp_path, torchrun, (), ("--resume", "auto")):
        assert outcome.code == Exit.USER
        assert "--resume is auto there and None on rank 0" in outcome.err


@pytest.mark.full
def test_a_refused_folder_is_told_on_every_rank(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/metrics.jsonl").write_text("{}\n")
    for outcome in run_both(tmp_path, torchrun, (), ()):
        assert outcome.code == Exit.USER
        assert "here holds a run already: add --resume" in outcome.err
