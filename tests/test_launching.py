"""Scripts of ``nanotrain launch`` train, on two nodes that are this machine, and what is not written."""

import re
import signal
import subprocess
import sys
import time

import pytest
from nanotrain_plan.hardware import shipped
from stand_ins import LONG, Cluster
from test_join import free_port
from test_run import SMALL, metrics

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit

COMMAND = f"command={sys.executable} -m nanotrain_core.cli"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return Cluster(tmp_path)


def write(target, *words):
    sizes = ["--nodes", "2", "--nproc", "2", "--folder", "here", "--out", "go.sh"]
    loopback = ["--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1"]
    assert main(["launch", target, "small.toml", *sizes, *loopback, *words]) == 0


def steps(folder):
    return [row["step"] for row in metrics(folder / "here")]


def wait_for_step(folder, step):
    deadline = time.monotonic() + 2 * LONG
    while not (folder / "here/metrics.jsonl").exists() or step not in steps(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(process):
    out, err = process.communicate(timeout=4 * LONG)
    return process.returncode, out + err


@pytest.mark.full
def test_slurm_trains_saves_on_its_warning_and_goes_on_from_the_queue(cluster):
    write("slurm", "--option", COMMAND, "--set", "run.steps=3000", "--set", "checkpoint.every=2000")
    job = cluster.start("go.sh")
    wait_for_step(cluster.folder, 5)
    job.send_signal(signal.SIGTERM)
    code, told = end(job)
    assert (code, cluster.requeued()) == (Exit.PREEMPTED, True), told
    stopped = max(steps(cluster.folder))
    assert list(cluster.folder.glob(f"here/checkpoints/step-{stopped:08}*"))
    # The queue starts the same script again. It is to end soon: another recipe of the same run.
    write("slurm", "--option", COMMAND, "--set", f"run.steps={stopped + 2}", "--set", "checkpoint.every=2000")
    code, told = end(cluster.start("go.sh", SLURM_RESTART_COUNT="1"))
    assert code == Exit.DONE, told
    assert steps(cluster.folder) == list(range(1, stopped + 3))  # none lost, none twice
    begun = metrics(cluster.folder / "here", "start")
    assert [row["world_size"] for row in begun] == [4, 4]
    assert begun[1]["first_step"] == stopped


@pytest.mark.full
def test_ssh_trains_on_all_hosts(cluster):
    write("ssh", "--option", "hosts=localhost,127.0.0.1", "--option", f"port={free_port()}")
    code, told = end(cluster.start("go.sh"))
    assert code == Exit.DONE, told
    assert steps(cluster.folder) == [1, 2, 3, 4, 5, 6]
    assert "4 ranks on cpu" in told


@pytest.mark.full
def test_lines_for_torchrun_train_together(cluster):
    torchrun = f"command={sys.executable} -m torch.distributed.run"
    words = ["--option", "hosts=localhost,127.0.0.1", "--option", f"port={free_port()}", "--option", torchrun]
    write("torchrun", *words)
    lines = [line for line in (cluster.folder / "go.sh").read_text().splitlines() if line and line[0] != "#"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(["bash", "-c", line], cwd=cluster.folder, **pipes) for line in lines]
    ends = [end(node) for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert steps(cluster.folder) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_what_does_not_fit_is_refused(cluster, capsys):
    small = shipped()["cpu"].read_text().replace("memory_gb = 32.0", "memory_gb = 1.0001")
    (cluster.folder / "tiny.toml").write_text(small)  # of which 1.0 is reserved
    words = ["launch", "slurm", "small.toml", "--nodes", "2", "--nproc", "1", "--hardware", "tiny.toml"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "the recipe does not fit tiny.toml: a rank needs " in err
    assert "nanotrain plan small.toml --nnodes 2 --nproc 1 --hardware tiny.toml" in err
    assert main([*words, "--no-plan"]) == 0
    host = re.sub(r"(?m)^host_memory_gb = \S+", "host_memory_gb = 2.0", shipped()["cpu"].read_text())
    (cluster.folder / "tiny.toml").write_text(host)  # two processes take more
    one_host = ["launch", "slurm", "small.toml", "--nodes", "1", "--nproc", "2", "--hardware", "tiny.toml"]
    assert main(one_host) == 2
    assert " of memory, most of it for its ranks' processes, and has 2 GB" in capsys.readouterr().err
    assert main([*words[:-1], "h1000"]) == 2
    assert "no hardware is named 'h1000'" in capsys.readouterr().err


@pytest.mark.full
def test_what_fits_is_told_in_the_script(cluster, capsys):
    assert main(["launch", "slurm", "small.toml", "--nodes", "2", "--nproc", "1"]) == 0
    assert " of 31 GB of memory on cpu, a step takes " in capsys.readouterr().out


def test_fewer_machines_must_be_able_to_run_the_recipe(cluster, capsys):
    sizes = ["--nodes", "3", "--nproc", "2", "--min-nnodes", "1", "--max-restarts", "1"]
    layout = [
        "--set",
        "topology.tp=3",
        "--set",
        "parallel=[{use='tp'}, {use='ddp'}]",
        "--set",
        "model.heads=6",
    ]
    layout += ["--set", "model.width=24", "--set", "batch.sequences=12"]
    words = ["launch", "ssh", "small.toml", "--option", "hosts=a,b,c", "--no-plan", *sizes, *layout]
    assert main(words) == Exit.USER
    assert "--min-nnodes 1: the recipe does not run on the ranks of 1: " in capsys.readouterr().err
