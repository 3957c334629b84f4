"""Parts of a GPU benchmark that end in every way a part can."""

import os
import signal
import subprocess
import time

from benchmarks.gpu.records import Recorder


def machine(settings):
    Recorder(settings.records).data("machine", {"device": "none", "memory GB": 80.0})


def no_machine(settings):
    Recorder(settings.records).data("refusal", "there is no GPU")


def well(settings):
    record = Recorder(settings.records)
    record.row("speeds", ok=True, model="small", ours="2")
    record.bar("llama", 1.06)


def partly(settings):
    record = Recorder(settings.records)
    with record.attempt("first", "gpt2"):
        raise ValueError("line 1\nwrong size")
    record.row("speeds", model="other", ours="3")


def raises(settings):
    Recorder(settings.records).row("speeds", model="before it raised", ours="4")
    print("what it said")
    raise RuntimeError("out of memory")


def killed(settings):
    Recorder(settings.records).row("speeds", model="before it was killed", ours="5")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(settings):
    Recorder(settings.records).row("speeds", model="before it hung", ours="6")
    time.sleep(600)


def misses(settings):
    Recorder(settings.records).bar("memory", 1.01)


def leaves(pipe, exit_code):
    """End before a process does that it has started, which holds a named pipe open."""
    with pipe.open("w") as held:
        subprocess.Popen(["sleep", "600"], stdout=held)
    if exit_code:
        os._exit(exit_code)
