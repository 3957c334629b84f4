"""Runs the ``nanotrain`` command as a user would, in a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import arbitrary_address
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.cli import main
from nanotrain_core.testing.pool import PRELOAD

#: What a terminal's shell would give: pytest may itself run with Ctrl-C ignored.
COMMAND = [
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from nanotrain_core.cli import main; sys.exit(main())",
]

# C++ reads it when torch is loaded: :func:`begin`'s processes have torch before `nanotrain` can say so.
os.environ.setdefault(LOG_LEVEL := "TORCH_CPP_LOG_LEVEL", "ERROR")


@attrs.define(frozen=True)
class Outcome:
    """What a finished command left."""

    code: int
    out: str
    err: str


def start(*words: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start ``nanotrain`` with ``words``; its output is piped."""
    environment = {**os.environ, "NO_COLOR": "1"}
    del environment[LOG_LEVEL]
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> Outcome:
    """Wait for the end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return Outcome(process.returncode, out, err)


@attrs.define(frozen=True)
class Running:
    """A command that :func:`begin` began."""

    words: Sequence[str]
    process: ForkServerProcess
    folder: Path

    def wait_for(self, beginning: str, timeout: float = 60) -> None:
        """Wait until a line of its output begins so.

        Raises:
            TimeoutError: none did; what it has printed is in the message.
        """
        until = time.monotonic() + timeout
        while not any(line.startswith(beginning) for line in self._read("out").splitlines()):
            if time.monotonic() > until or self.process.exitcode is not None:
                raise TimeoutError(
                    f"no line begins with {beginning!r}: {self._read('out')}{self._read('err')}"
                )
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def end(self, timeout: float = 120) -> Outcome:
        """Wait for the end."""
        self.process.join(timeout)
        hangs = self.process.exitcode is None
        if hangs:
            self.process.kill()
            self.process.join()
        out, err = self._read("out"), self._read("err")
        shutil.rmtree(self.folder)
        if hangs:
            raise subprocess.TimeoutExpired(self.words, timeout, out, err)
        return Outcome(int(self.process.exitcode or 0), out, err)


def begin(*words: str, cwd: Path) -> Running:
    """Start ``nanotrain`` from a process that has torch loaded: 5 seconds less than :func:`start`.

    What :func:`start` starts is new in every way.
    """
    folder = Path(tempfile.mkdtemp(prefix="nanotrain-command-"))
    (folder / "out").touch(), (folder / "err").touch()
    environment = {**os.environ, "NO_COLOR": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_be_nanotrain, args=(words, cwd, environment, folder))
    process.start()
    return Running(words, process, folder)


def nanotrain(*words: str, cwd: Path) -> Outcome:
    """Run ``nanotrain`` to its end."""
    return begin(*words, cwd=cwd).end()


def _be_nanotrain(words: Sequence[str], cwd: Path, environment: dict[str, str], folder: Path) -> None:
    """Become what a shell would have started, but for what is imported already."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    sys.argv = ["nanotrain", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):  # under nohup one is ignored
        signal.signal(number, signal.SIG_DFL)
    forkserver.ensure_running = forkserver._forkserver.ensure_running = _fork_a_server
    sys.exit(main())


def _fork_a_server() -> None:
    """Start the server of ranks as a copy of this process: it need not import torch once more."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        return
    resource_tracker.ensure_running()
    if "OMP_NUM_THREADS" in os.environ:  # which torch reads when it is imported
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    server._forkserver_address = arbitrary_address("AF_UNIX")
    alive, server._forkserver_alive_fd = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(server._forkserver_address)
        listener.listen()
        server._forkserver_pid = os.fork()
        if server._forkserver_pid == 0:
            os.close(server._forkserver_alive_fd)
            forkserver.main(listener.detach(), alive, preload=[])
    os.close(alive)
