"""Ranks that torchrun or srun started join one another, or find out why they must not."""

import json
import os
import socket
import subprocess
import sys

import pytest
from command import COMMAND, finish, nanotrain
from test_run import SMALL, metrics
from torch.distributed import TCPStore

from nanotrain_core.errors import Exit
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
    port, processes = free_port(), []
    for rank, words in enumerate(words_of_rank):
        environment = {**os.environ, **{k: str(v) for k, v in launcher(rank, port).items()}}
        command = [*COMMAND, "run", "small.toml", "--folder", "here", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
    return [finish(process) for process in processes]


@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_two_started_processes_train_together(tmp_path, launcher):
    zero, one = run_both(tmp_path, launcher, (), ())
    assert (zero.code, zero.err, one.code, one.err) == (Exit.DONE, "", Exit.DONE, "")
    assert "2 ranks on cpu" in zero.out
    assert one.out == ""
    assert len(metrics(tmp_path / "here")) == 6


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


@pytest.mark.parametrize(("at", "again", "ranks"), [(1, 3, 1), pytest.param(4, 6, 2, marks=pytest.mark.full)])
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


def test_ranks_with_different_recipes_are_told_so_before_they_train(tmp_path):
    for outcome in run_both(tmp_path, torchrun, (), ("--set", "optimizer.lr=0.5")):
        assert outcome.code == Exit.USER
        assert outcome.err.startswith("nanotrain: rank 1 on ")
        assert "recipe hash is " in outcome.err
        assert "Traceback" not in outcome.err
        assert "step=" not in outcome.out


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
