"""The ``nanotrain`` command. Each subcommand is one module, imported only when it is called."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

#: Members of :class:`nanotrain_core.errors.Exit`, without the time that its import takes.
PREEMPTED, INTERRUPTED = 75, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors are printed without a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["run"] or "--then" in words:
        _end_on_signals(interrupts=words[:1] == ["run"])
    try:
        from nanotrain_core.cli.dispatch import call

        return call(words)
    except KeyboardInterrupt:  # from the import on, which takes a while on a slow disk
        print("nanotrain: interrupted", file=sys.stderr)
        return INTERRUPTED


def _end_on_signals(*, interrupts: bool) -> None:
    """Let SIGTERM, SIGHUP and SIGUSR1 end this process, as one that trains, before anything else is imported.

    The kernel discards a signal without a handler if this is the first process of a container: a pod that is
    terminated while it starts would train on until it is killed. With ``interrupts`` Ctrl-C does, too: a
    KeyboardInterrupt in the midst of torch's import leaves modules half imported, which crash when used.
    """

    own = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != own:  # a worker, which its pool terminates
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            signal.raise_signal(number)
        told = f"ended by {signal.Signals(number).name} before training began: nothing was saved"
        os.write(2, f"nanotrain: {told}\n".encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)

    if threading.current_thread() is not threading.main_thread():  # it may set no handlers
        return
    signal.signal(signal.SIGTERM, end)
    if interrupts and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # which a shell's background job has
        signal.signal(signal.SIGINT, end)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # which `nohup` has set for the first
            signal.signal(number, end)
