"""Stopping a run, or rolling it back, at a step boundary that all ranks agree on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Literal

import attrs
import structlog
from attrs.validators import ge, instance_of

from nanotrain_core.errors import Exit, Preempted
from nanotrain_core.run import log
from nanotrain_core.run.progress_bar import is_live

StopReason = Literal["stopped", "preempted", "interrupted", "lost"]

#: From the most to the least urgent: the agreed reason when ranks requested different ones.
REASONS: tuple[StopReason, ...] = ("lost", "interrupted", "preempted", "stopped")

SIGNALS: dict[signal.Signals, StopReason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGUSR1: "preempted",
}
#: Signals that end a process that has no step to finish: termination, a closed terminal, or a scheduler's
#: notice before its time limit, as `sbatch --signal=USR1@300` is usually written.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: The exit code of ``nanotrain run`` for each final status of a run.
EXIT_OF: dict[str, int] = {
    "done": Exit.DONE,
    "stopped": Exit.DONE,
    "preempted": Exit.PREEMPTED,
    "interrupted": Exit.INTERRUPTED,
    "lost": Exit.UNSAVED,
}

#: Seconds within which consecutive signals of these kinds count as one request.
REPEAT_WINDOW = 1.0


def is_repeat(number: int, first: int, since: float) -> bool:
    """Return whether a signal repeats the request that ``first`` was, at monotonic time ``since``.

    Slurm, ``timeout`` and a shell's ``kill %1`` signal all processes, and a launcher forwards it to its
    ranks. systemd with ``SendSIGHUP`` sends both ending signals, as a supervisor and a closed terminal do
    together.
    """
    return number in ENDING and first in ENDING and time.monotonic() - since < REPEAT_WINDOW


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: all except a SIGHUP or SIGUSR1 that this process ignores.

    ``nohup`` makes it ignore the first.
    """
    may_be_ignored = (signal.SIGHUP, signal.SIGUSR1)
    return [
        number
        for number in SIGNALS
        if number not in may_be_ignored or signal.getsignal(number) != signal.SIG_IGN
    ]


@attrs.define(frozen=True)
class Rollback:
    """A request to roll back to a checkpoint from before a failure, and to skip the data since then."""

    onset: int = attrs.field(validator=[instance_of(int), ge(1)])
    """The first step whose update is suspect: the checkpoint is older, and data from here on is skipped."""
    reason: str = attrs.field(validator=instance_of(str))
    """A human-readable reason, for the log."""


def handle_ending_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Handle the signals of :data:`ENDING` that this process does not ignore."""
    for number in {*ENDING} & {*stop_signals()}:
        signal.signal(number, handler)


def end_on_sigterm(before: Callable[[Preempted], object], *, interrupts: bool = False) -> None:
    """End this process immediately on SIGTERM, SIGHUP or SIGUSR1 while it has no training step to finish.

    It is not unwound: an exception would come out of whatever code is running, which may swallow it or report
    it as an error of its own, as imports do, or abort, as C++ code of torch does that calls Python.

    Args:
        before: called first, in the signal handler, with the reason.
        interrupts: whether Ctrl-C does so, too, unless this process ignores it.
    """
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a worker, which its pool terminates
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            signal.raise_signal(number)
        handle_ending_signals(signal.SIG_IGN)  # already being handled
        if interrupts:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        name = signal.Signals(number).name
        text = (
            f"ended by {name} outside of a training step: nothing was saved, only complete checkpoints remain"
        )
        try:
            before(Preempted(text))
        finally:
            os._exit(EXIT_OF[SIGNALS[signal.Signals(number)]])

    handle_ending_signals(end)
    if interrupts and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


def keep_exit_code(code: int) -> int:
    """Keep later signals from changing the exit code of this process, which is returned.

    Only the interpreter's own shutdown remains, which takes a second with torch. Signals are ignored there:
    a handler is gone before the interpreter is, and a second SIGTERM would then end it with another code.
    """
    if threading.current_thread() is threading.main_thread():
        handle_ending_signals(signal.SIG_IGN)
    return code


class StopRequest:
    """Collects stop requests on this rank; ``reason`` is set once all ranks have agreed on one."""

    grace: float | None = None
    """Seconds after a signal within which training must end, else this process does; None: no limit."""
    folder_gone: Callable[[], bool] | None = None
    """Returns whether the run folder was deleted or replaced; None where nobody has claimed it."""

    def __init__(self) -> None:
        self.reason: StopReason | None
        self._requested: set[StopReason]
        self.clear()

    def clear(self) -> None:
        """Clear earlier requests: a new call of fit begins."""
        self.reason, self._requested = None, set()
        self.rollback: Rollback | None = None
        """The rollback that this rank requests, if any."""
        self.rollback_agreed = False
        """Whether any rank requests a rollback, as agreed by all ranks."""

    def request(self, reason: StopReason) -> bool:
        """Ask to stop at the next agreement; return whether this rank had not asked for this reason."""
        known = reason in self._requested
        self._requested.add(reason)
        return not known

    def request_rollback(self, rollback: Rollback | None) -> None:
        """Request a rollback at the next agreement; None when it is done. The earliest request counts.

        An agreed rollback is not withdrawn: the other ranks are about to perform it.
        """
        if rollback is None:
            self.rollback, self.rollback_agreed = None, False
        elif self.rollback is None or rollback.onset < self.rollback.onset:
            self.rollback = rollback

    def meta(self) -> dict[str, Any] | None:
        """Return the pending rollback for a checkpoint, None without one."""
        if self.rollback is None:
            return None
        return {**attrs.asdict(self.rollback), "agreed": self.rollback_agreed}

    def load_meta(self, meta: Mapping[str, Any] | None) -> None:
        """Restore what :meth:`meta` returned."""
        self.rollback = None if meta is None else Rollback(meta["onset"], meta["reason"])
        self.rollback_agreed = meta is not None and bool(meta["agreed"])

    def flags(self) -> list[float]:
        """Return this rank's requests as numbers to be summed over all ranks."""
        return [*(float(reason in self._requested) for reason in REASONS), float(self.rollback is not None)]

    def agree(self, summed: Sequence[float]) -> None:
        """Record what all ranks together request."""
        *stops, self.rollback_agreed = map(bool, summed)
        self.reason = next((reason for reason, asked in zip(REASONS, stops, strict=True) if asked), None)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn the first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 into a stop request; a second has its default
        effect. A script's process may use SIGUSR1 for something else: it counts if a command handles it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in stop_signals()}
        if before.get(signal.SIGUSR1) == signal.SIG_DFL:  # also where faulthandler has registered it
            del before[signal.SIGUSR1]
        received: dict[signal.Signals, float] = {}
        over = threading.Event()

        def handle(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number)
            if not received:
                received[name] = time.monotonic()
                self.request(SIGNALS[name])
            elif not is_repeat(number, *next(iter(received.items()))):
                signal.signal(number, before[name])
                signal.raise_signal(number)

        if self.grace is not None:
            first = structlog.contextvars.get_contextvars().get("rank", 0) == 0
            watch = partial(_end_after, self.grace, received, over, first=first)
            threading.Thread(target=watch, daemon=True).start()

        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            over.set()
            for number, handler in before.items():
                signal.signal(number, handler)


def announce(grace: float) -> None:
    """Tell the user who pressed Ctrl-C what happens now."""
    text = f"stopping after this step and a checkpoint, within {grace:g} s"
    with suppress(OSError):  # nobody reads the terminal: stop all the same
        log.say(f"{text}; press Ctrl-C again to kill all ranks", level="warning")


def _end_after(
    grace: float, received: Mapping[signal.Signals, float], over: threading.Event, *, first: bool
) -> None:
    """End this process if training has not ended this long after the first signal: a rank may hang."""
    announced = False
    while not over.wait(0.2):
        if signal.SIGINT in received and not announced:
            announced = True
            if first and is_live(sys.stdout):
                announce(grace)  # here, and not in the launcher, which would write into the console's panel
        if received and time.monotonic() - min(received.values()) > grace:
            number = next(iter(received))
            text = f"ended: a last step and checkpoint took more than {grace:g} seconds (run.grace)"
            log.say(f"{text} after {number.name}")
            os._exit(EXIT_OF[SIGNALS[number]])
