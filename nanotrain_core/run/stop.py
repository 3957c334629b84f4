"""Stopping a run, or taking it back, at a step boundary that all ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal

import attrs
from attrs.validators import ge, instance_of

from nanotrain_core.errors import Exit, Preempted
from nanotrain_core.run import log

StopReason = Literal["stopped", "preempted", "interrupted"]

#: From the most to the least urgent: what the ranks agree on when they asked for different things.
REASONS: tuple[StopReason, ...] = ("interrupted", "preempted", "stopped")

SIGNALS: dict[signal.Signals, StopReason] = {signal.SIGINT: "interrupted", signal.SIGTERM: "preempted"}

#: Exit codes of runs that were stopped.
EXITS: dict[str, int] = {"preempted": Exit.PREEMPTED, "interrupted": Exit.INTERRUPTED}

#: Seconds in which a SIGTERM after the first is that one again.
ECHO = 1.0


def is_again(number: int, since: float) -> bool:
    """Return whether a signal is the one received at monotonic time ``since``, on another way.

    Slurm, ``timeout`` and a shell's ``kill %1`` tell all processes, and a launcher tells its ranks once more.
    """
    return number == signal.SIGTERM and time.monotonic() - since < ECHO


@attrs.define(frozen=True)
class Rollback:
    """A request to go back to a checkpoint from before things went wrong, and not to see that data again."""

    onset: int = attrs.field(validator=[instance_of(int), ge(1)])
    """The first step whose update is suspected: the checkpoint is older, and data from here on is skipped."""
    reason: str = attrs.field(validator=instance_of(str))
    """In words, for the record."""


def end_on_sigterm() -> None:
    """End this process at once on SIGTERM, as long as it trains nothing: there is no step to finish."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is on its way
        raise Preempted("ended by SIGTERM at once: the last checkpoint, if there is one, is all there is")

    signal.signal(signal.SIGTERM, end)


class StopRequest:
    """Collects stop requests on this rank; ``reason`` is set once every rank knows of one."""

    grace: float | None = None
    """Seconds after a signal in which training must end, or this process does; None: it may take its time."""

    def __init__(self) -> None:
        self.reason: StopReason | None
        self._requested: set[StopReason]
        self.clear()

    def clear(self) -> None:
        """Forget earlier requests: a new call of fit begins."""
        self.reason, self._requested = None, set()
        self.rollback: Rollback | None = None
        """This rank's own request."""
        self.rollback_agreed = False
        """Whether any rank requests to go back, as all ranks know."""

    def request(self, reason: StopReason) -> None:
        """Ask to stop at the next agreement."""
        self._requested.add(reason)

    def request_rollback(self, rollback: Rollback | None) -> None:
        """Ask to go back at the next agreement; None when that is done. The earliest request counts.

        What is agreed stays so: the other ranks are about to go back.
        """
        if rollback is None:
            self.rollback, self.rollback_agreed = None, False
        elif self.rollback is None or rollback.onset < self.rollback.onset:
            self.rollback = rollback

    def flags(self) -> list[float]:
        """Return this rank's requests as numbers to be summed over all ranks."""
        return [*(float(reason in self._requested) for reason in REASONS), float(self.rollback is not None)]

    def agree(self, summed: Sequence[float]) -> None:
        """Learn what all ranks together request."""
        *stops, self.rollback_agreed = map(bool, summed)
        self.reason = next((reason for reason, asked in zip(REASONS, stops, strict=True) if asked), None)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into a stop request; a second one acts as it would without us."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        received: dict[signal.Signals, float] = {}
        over = threading.Event()

        def handle(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number)
            if name not in received:
                received[name] = time.monotonic()
                self.request(SIGNALS[name])
            elif not is_again(number, received[name]):
                signal.signal(number, before[name])
                signal.raise_signal(number)

        if self.grace is not None:
            threading.Thread(target=_end_after, args=(self.grace, received, over), daemon=True).start()

        for number in SIGNALS:
            signal.signal(number, handle)
        try:
            yield
        finally:
            over.set()
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_after(grace: float, received: Mapping[signal.Signals, float], over: threading.Event) -> None:
    """End this process if training is not over so long after the first signal: a rank may wait for ever."""
    while not over.wait(0.2):
        if received and time.monotonic() - min(received.values()) > grace:
            number = next(iter(received))
            text = f"ended: a last step and checkpoint took more than {grace:g} seconds (run.grace)"
            log.say(f"{text} after {number.name}")
            os._exit(EXITS[SIGNALS[number]])
