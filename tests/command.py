"""Runs the ``nanotrain`` command as a user would, in a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import arbitrary_address
from pathlib import Path

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


@attrs.define(frozen=True)
class Outcome:
    """What a finished command left."""

    code: int
    out: str
    err: str


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Start ``nanotrain`` with ``words``; its output is piped."""
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> Outcome:
    """Wait for the end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return Outcome(process.returncode, out, err)


def nanotrain(*words: str, cwd: Path, timeout: float = 120) -> Outcome:
    """Run ``nanotrain`` to its end, from a process that has torch loaded: 5 seconds less than a new one.

    What :func:`start` starts is new in every way.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        environment = {**os.environ, "NO_COLOR": "1"}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        process = context.Process(target=_be_nanotrain, args=(words, cwd, environment, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, out.read_text(), err.read_text())
        return Outcome(process.exitcode, out.read_text(), err.read_text())


def _be_nanotrain(words: Sequence[str], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    """Become what a shell would have started, but for what is imported already."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    sys.argv = ["nanotrain", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forkserver.ensure_running = forkserver._forkserver.ensure_running = _fork_a_server
    sys.exit(main())


def _fork_a_server() -> None:
    """Start the server of ranks as a copy of this process: it need not import torch once more."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        return
    resource_tracker.ensure_running()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which torch reads when it is imported
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
