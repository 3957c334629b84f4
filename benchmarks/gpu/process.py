"""Functions in processes of their own, that can be given up: on a GPU only their end gives all memory back.

They come from a forkserver that has torch loaded and never touches the device.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

#: What the forkserver loads, as ``nanotrain run`` does.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "nanotrain_core.engine"]

#: Seconds that a process has to end after it was asked to.
GRACE = 5.0


def context(method: str = "forkserver") -> BaseContext:
    """Return how processes are started: ``forkserver``, or ``spawn`` where that finds no device."""
    found = multiprocessing.get_context(method)
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)
    return found


def alone(
    call: Callable[[], object],
    log: Path,
    seconds: float,
    how: BaseContext,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Call ``call`` in a process of its own; return how it ended, empty if well.

    Args:
        call: can be pickled. What it prints goes to ``log``.
        log: a file.
        seconds: after which it is killed. Processes that it has started are killed when it has ended.
        how: see :func:`context`.
        meanwhile: called every few seconds.
    """
    process: Any = how.Process(target=_be_alone, args=(call, log, seconds, os.getpid()))
    process.start()
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end:
        process.join(min(3.0, max(0.0, end - time.monotonic())))
        meanwhile()
    late = process.is_alive()
    _end(process)
    if late:
        return f"was ended after its {seconds:.0f} s"
    code = process.exitcode
    if code:
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return ""


def _end(process: Any) -> None:
    """Kill a process, if it has not ended, and its group, which would share the device with what follows."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        process.join(GRACE)


def _be_alone(call: Callable[[], object], log: Path, seconds: float, parent: int) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    with log.open("ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, seconds - 2), exit=False)  # where it was when it was killed
    call()
    faulthandler.cancel_dump_traceback_later()


def end_with(parent: int) -> None:
    """End this process as soon as ``parent`` has: a forkserver's children are nobody's group."""

    def watch() -> None:
        while True:
            time.sleep(0.5)
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
