"""A run that is asked to stop and cannot is ended when its grace is over, whoever started its ranks."""

import os
import signal
import subprocess

import pytest
from command import COMMAND, begin, finish, nanotrain
from test_join import free_port, torchrun
from test_run import SMALL

from nanotrain_core.errors import Exit

SLEEPS = """
import time
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    pass

def build(config):
    from nanotrain_core.contracts import Monitor

    class Sleeps(Monitor):
        def on_start(self, run):
            self.rank = run.rank

        def on_step(self, report):
            if report.step == 4 and self.rank == 0:
                print("asleep", flush=True)
                time.sleep(3600)

    return Sleeps()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="sleeps", config=Config, factory=f"{__name__}:build", summary="sleeps"))
"""
WORDS = ["run", "small.toml", "--folder", "here", "--plugin", "sleeps.py"]
WORDS += ["--set", 'monitor.2.use="sleeps"', "--set", "run.grace=1.5", "--set", "run.hang_timeout=0"]
SAID = "took more than 1.5 seconds (run.grace) after SIGTERM"


@pytest.fixture
def here(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    return tmp_path


def wait_until_asleep(process):
    assert any(line == "asleep\n" for line in process.stdout)


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_ranks_of_nanotrain_are_ended_and_the_last_checkpoint_is_there(here, ranks):
    process = begin(*WORDS, "--nproc", ranks, cwd=here)
    process.wait_for("asleep")
    process.send_signal(signal.SIGTERM)
    ended = process.end()
    assert ended.code == Exit.PREEMPTED
    assert "Traceback" not in ended.err
    assert nanotrain("ckpt", "verify", "here", cwd=here).out.startswith("step 3: whole\n")


@pytest.mark.full
def test_ranks_that_torchrun_or_srun_started_end_themselves(here):
    port, processes = free_port(), []
    for rank in (0, 1):
        environment = {**os.environ, **{k: str(v) for k, v in torchrun(rank, port).items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*COMMAND, *WORDS], cwd=here, env=environment, **pipes))
    wait_until_asleep(processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    ended = [finish(process) for process in processes]
    assert ended[0].code == Exit.PREEMPTED
    assert ended[0].err == f"nanotrain: ended: a last step and checkpoint {SAID}\n"
    assert ended[1].code != Exit.DONE
