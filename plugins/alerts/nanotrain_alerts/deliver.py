"""An alert on its way: to a program, an address or a file."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import attrs

from nanotrain_alerts import Target, webhook_host
from nanotrain_core.api import append_line

#: Timeouts in seconds of a program, and of an answer to a webhook: less than a run waits at its end, so that
#: a delivery that hangs does not hold back the last alert.
COMMAND_TIMEOUT, WEBHOOK_TIMEOUT = 20.0, 10.0
#: Runs a program in a process of its own, which ends the program and what that has started after a time:
#: this process, which does so before, may be killed meanwhile.
GUARD = """
import os, signal, subprocess, sys
try:
    code = subprocess.Popen(sys.argv[2:]).wait(float(sys.argv[1]))
except subprocess.TimeoutExpired:
    os.killpg(0, signal.SIGKILL)
except OSError as problem:
    sys.exit(str(problem))
sys.exit(code if code >= 0 else 128 - code)
"""
#: How often an address is tried.
TRIES = 2


@attrs.define(frozen=True, kw_only=True)
class Alert:
    """What is sent, as JSON."""

    run: str
    step: int
    level: str
    """``good``, ``warn`` or ``bad``."""
    text: str
    """The whole of it in one sentence."""
    event: str
    """Of a rule for an event; else empty."""
    metric: str
    """Of a rule for a metric; else empty."""
    value: float | None
    left_out: int
    """Alerts of the same rule and metric since the last that was sent."""
    time: float
    """Seconds since 1970."""

    def as_json(self) -> str:
        """Return one line; a value that is not finite is a text, ``"NaN"``."""
        fields = attrs.asdict(self)
        if self.value is not None and not math.isfinite(self.value):
            fields["value"] = json.dumps(self.value)
        return json.dumps(fields, allow_nan=False)

    def as_environment(self) -> dict[str, str]:
        """Return the variables of a program that gets the alert."""
        fields = {"text": self.text, "run": self.run, "step": self.step, "level": self.level}
        fields |= {"metric": self.metric or self.event, "value": "" if self.value is None else self.value}
        # The system takes no NUL in a variable.
        return {f"NANOTRAIN_ALERT_{key.upper()}": str(x).replace("\0", "") for key, x in fields.items()}


def deliver(alert: Alert, to: Target, folder: Path) -> Iterator[str]:
    """Send an alert, and yield a sentence for each way that failed. Relative paths are in ``folder``.

    The sentences are logged: they have neither a webhook's path nor a command's arguments, which may be
    secrets.
    """
    ways: list[tuple[str, Callable[[], None]]] = []
    if to.file:
        ways.append((to.file, lambda: append_line(folder / to.file, alert.as_json())))
    if to.command:
        ways.append((to.command[0], lambda: _run(alert, to.command)))
    of_variable = os.environ.get(to.webhook_variable, "") if to.webhook_variable else ""
    for address in filter(None, (to.webhook, of_variable)):
        ways.append((f"webhook at {webhook_host(address)}", partial(_post, alert, address)))
    for name, send in ways:
        try:
            send()
        except subprocess.TimeoutExpired:
            yield f"{name}: no end after {COMMAND_TIMEOUT:g} seconds"
        except (HTTPError, HTTPException) as problem:  # some have the URL, or that of a redirection
            yield f"{name}: {getattr(problem, 'code', type(problem).__name__)}"
        except Exception as problem:
            yield f"{name}: {problem}"


def _run(alert: Alert, command: tuple[str, ...]) -> None:
    """Run a program without a shell: nothing of the alert is ever part of its command line."""
    guarded = [sys.executable, "-IS", "-c", GUARD, str(COMMAND_TIMEOUT + 1), *command]
    with subprocess.Popen(
        guarded,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **alert.as_environment()},
        text=True,
        start_new_session=True,  # Ctrl-C is for the run: a program that reports the interrupt lives on
    ) as process:
        try:
            _, said = process.communicate(alert.as_json() + "\n", timeout=COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        said = said.strip()[-500:]
        raise RuntimeError(f"exit code {process.returncode}" + (f": {said}" if said else ""))


def _post(alert: Alert, address: str) -> None:
    request = urllib.request.Request(
        address, alert.as_json().encode(), {"Content-Type": "application/json", "User-Agent": "nanotrain"}
    )
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT) as answer:
                if answer.status < HTTPStatus.BAD_REQUEST:
                    return
        except OSError:
            if not left:
                raise
