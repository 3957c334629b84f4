"""Programs of a cluster, as far as scripts use them, strict about what they are asked; and one job's state.

They are written from the manuals: srun(1), scontrol(1) and scancel(1) of Slurm 24.05, ssh(1) of OpenSSH.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("srun", "scontrol", "scancel", "ssh", "sleeper")
#: Seconds that anything may take.
LONG = 60

TINY = """
[run]
name = "Tiny Run/1"
steps = 3
ranks = 4
device = "cuda"
grace = 90.0
[batch]
sequences = 8
microbatch = 1
length = 16
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 64
[data]
use = "synthetic"
vocab = 64
"""


def after(words, option):
    return words[words.index(option) + 1]


class Cluster:
    """Two nodes on this machine: programs in ``bin``, what they did in ``state``."""

    def __init__(self, folder):
        self.folder, self.state, self.bin = folder, folder / "state", folder / "bin"
        self.state.mkdir()
        self.bin.mkdir()
        for name in PROGRAMS:
            program = self.bin / name
            program.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{__file__}' {name} \"$@\"\n")
            program.chmod(0o755)
        self.set_job("RUNNING")

    @property
    def sleeper(self):
        """A launcher's place is taken by this: it waits for SIGTERM, or ends with the code in ``$CODE``."""
        return str(self.bin / "sleeper")

    def set_job(self, state):
        (self.state / "job").write_text(state)

    def start(self, script, *words, **environment):
        """Start a script of the shell."""
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "2"}
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}", "CLUSTER": str(self.state)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        everything = {**os.environ, **slurm, **own, **environment}
        return subprocess.Popen(["bash", script, *words], cwd=self.folder, env=everything, **pipes)

    def wait_for(self, pattern, count):
        """Return what so many files in ``state`` hold, once there are."""
        deadline = time.monotonic() + LONG
        while len(found := sorted(self.state.glob(pattern))) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} {pattern}"
            time.sleep(0.02)
        return [json.loads(path.read_text()) for path in found]

    def requeued(self):
        return (self.state / "requeued").exists()

    def signalled(self):
        return (self.state / "signalled").exists()


def note(name, value):
    path = Path(os.environ["CLUSTER"], name)
    path.with_name(f".{name}").write_text(json.dumps(value))
    path.with_name(f".{name}").rename(path)


def srun(words):
    """Start one task a node; a SIGTERM kills them, as srun's "forcing job termination" does."""
    flags = {"--label"}
    known = {"--ntasks-per-node": "1", "--cpu-bind": "none", "--kill-on-bad-exit": "0", "--wait": r"\d+"}
    known["--cpus-per-task"] = os.environ["SLURM_CPUS_ON_NODE"]
    while words[0].startswith("--"):
        key, _, value = words.pop(0).partition("=")
        assert key in flags or re.fullmatch(known[key], value), (key, value)
    tasks = []
    for rank in range(2):
        place = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        place |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[1-2]"}
        tasks.append(subprocess.Popen(words, env={**os.environ, **place}, start_new_session=True))
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
    note("tasks", [task.pid for task in tasks])
    codes = [task.wait() for task in tasks]
    sys.exit(max(128 - code if code < 0 else code for code in codes))


def scontrol(words):
    state = Path(os.environ["CLUSTER"])
    if words[:2] == ["show", "hostnames"]:
        assert words[2:] == ["node[1-2]"]
        print("localhost\nlocalhost")
    elif words == ["show", "job", "4711"]:
        print(f"JobId=4711 JobName=x\n   JobState={(state / 'job').read_text()} Reason=None")
    else:
        assert words == ["requeue", "4711"], words
        note("requeued", True)


def scancel(words):
    """Tell all steps of the job, and not its script."""
    assert words == ["--signal=TERM", "4711"], words
    note("signalled", True)
    for pid in json.loads(Path(os.environ["CLUSTER"], "tasks").read_text()):
        os.kill(pid, signal.SIGTERM)


def ssh(words):
    while words[0] == "-o":
        assert words[1] in ("BatchMode=yes", "ServerAliveInterval=30")
        del words[:2]
    if words[0] == "away":
        print("ssh: connect to host away port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    os.environ["HERE"] = words[0]
    os.execvp("sh", ["sh", "-c", " ".join(words[1:])])


def sleeper(words):
    name = os.environ.get("HERE") or f"task-{os.environ['SLURM_PROCID']}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    note(f"launcher-{name}", {"words": words, "environment": dict(os.environ), "pid": os.getpid()})
    if "CODE" in os.environ:
        sys.exit(int(os.environ["CODE"]))
    time.sleep(LONG)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
