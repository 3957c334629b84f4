"""The scripts run, with stand-ins for the cluster's programs and launchers: signals, codes, the queue."""

import os
import signal

import pytest
from stand_ins import LONG, TINY, Cluster, after

from nanotrain_core.cli import main


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    return Cluster(tmp_path)


def write(cluster, target, *words):
    command = ["launch", target, "tiny.toml", "--nodes", "2", "--no-plan", "--out", "go.sh"]
    assert main([*command, "--option", f"command={cluster.sleeper}", *words]) == 0


def end(process):
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out + err


def test_slurm_starts_one_launcher_a_node_and_all_meet_at_the_first(cluster):
    write(cluster, "slurm", "--env", "NCCL_DEBUG=WARN", "--set", "run.steps=9")
    code, _ = end(cluster.start("go.sh", CODE="0"))
    launchers = cluster.wait_for("launcher-*", 2)
    assert code == 0
    assert not cluster.requeued()
    assert [each["environment"]["SLURM_PROCID"] for each in launchers] == ["0", "1"]
    for each in launchers:
        words = each["words"]
        assert words[:2] == ["run", "tiny.toml"]
        assert (after(words, "--set"), after(words, "--nnodes"), after(words, "--nproc")) == (
            "run.steps=9",
            "2",
            "2",
        )
        assert after(words, "--rdzv-endpoint") == "localhost:24711"
        assert after(words, "--rdzv-id") == "4711-0"
        assert each["environment"]["NCCL_DEBUG"] == "WARN"


def test_slurms_warning_reaches_the_launchers_and_the_job_goes_back_to_the_queue(cluster):
    write(cluster, "slurm")
    job = cluster.start("go.sh")
    cluster.wait_for("launcher-*", 2), cluster.wait_for("tasks", 1)
    job.send_signal(signal.SIGTERM)
    code, told = end(job)
    assert (code, cluster.requeued()) == (75, True), told
    assert "back to the queue" in told


def test_a_job_that_is_cancelled_is_told_once_and_stays_out_of_the_queue(cluster):
    write(cluster, "slurm")
    job = cluster.start("go.sh")
    launchers = cluster.wait_for("launcher-*", 2)
    cluster.set_job("COMPLETING")
    job.send_signal(signal.SIGTERM)  # scancel tells the script and the steps
    for each in launchers:
        os.kill(each["pid"], signal.SIGTERM)
    code, told = end(job)
    assert (code, cluster.requeued(), cluster.signalled()) == (75, False, False), told


@pytest.mark.parametrize(
    ("code", "requeued"),
    [
        (1, True),
        (137, True),
        (2, False),
        *(pytest.param(code, True, marks=pytest.mark.full) for code in (5, 143, 129)),
        *(pytest.param(code, False, marks=pytest.mark.full) for code in (3, 6)),
    ],
)
def test_which_codes_bring_a_job_back(cluster, code, requeued):
    write(cluster, "slurm")
    ended, _ = end(cluster.start("go.sh", CODE=str(code)))
    assert (ended, cluster.requeued()) == (code, requeued)


@pytest.mark.full
def test_crashes_are_counted_and_not_other_restarts(cluster):
    write(cluster, "slurm", "--option", "requeues=1", "--folder", "of a run")
    told = []
    for restarts, code in enumerate((75, 75, 1, 75, 5)):
        (cluster.state / "requeued").unlink(missing_ok=True)
        end(cluster.start("go.sh", CODE=str(code), SLURM_RESTART_COUNT=str(restarts)))
        told.append(cluster.requeued())
    assert told == [True, True, True, True, False]
    lines = (cluster.folder / "of a run/.crashes-4711").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["1", "5"]
    end(cluster.start("go.sh", CODE="1", SLURM_JOB_ID="4712"))  # another job counts its own
    assert len((cluster.folder / "of a run/.crashes-4712").read_text().splitlines()) == 1


def test_a_job_whose_crashes_cannot_be_counted_does_not_come_back_for_ever(cluster):
    (cluster.folder / "file").touch()
    write(cluster, "slurm", "--folder", "file")
    code, _ = end(cluster.start("go.sh", CODE="1"))
    assert (code, cluster.requeued()) == (1, False)


def hosts(*names):
    return ["--option", f"hosts={','.join(names)}"]


def test_ssh_starts_all_hosts_and_stops_them_with_it(cluster):
    write(cluster, "ssh", *hosts("one", "two"), "--env", "A=b c")
    script = cluster.start("go.sh")
    launchers = cluster.wait_for("launcher-*", 2)
    for each in launchers:
        assert after(each["words"], "--rdzv-endpoint") == "one:29400"
        assert each["environment"]["A"] == "b c"
    script.send_signal(signal.SIGTERM)
    code, told = end(script)
    assert code == 75, told


def test_ssh_is_stopped_from_another_shell(cluster):
    write(cluster, "ssh", *hosts("one", "two"))
    script = cluster.start("go.sh")
    cluster.wait_for("launcher-*", 2)
    assert end(cluster.start("go.sh", "stop"))[0] == 0
    assert end(script)[0] == 75


def test_a_host_that_ssh_does_not_reach_keeps_no_other_waiting(cluster):
    write(cluster, "ssh", *hosts("one", "away"))
    code, told = end(cluster.start("go.sh"))
    assert code == 255, told
    assert "away could not be reached" in (cluster.folder / "launch-tiny-run-1/away.log").read_text()


def test_the_worst_code_of_all_hosts_is_the_scripts(cluster):
    write(cluster, "ssh", *hosts("one", "two"))
    assert end(cluster.start("go.sh", CODE="3"))[0] == 3
