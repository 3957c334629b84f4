"""Runs the ``nanotrain`` command as a user would, in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs

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


def nanotrain(*words: str, cwd: Path) -> Outcome:
    """Run ``nanotrain`` to its end."""
    return finish(start(*words, cwd=cwd))
