"""Stopping a run at a step boundary that all ranks agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from nanotrain_core.errors import Preempted

StopReason = Literal["stopped", "preempted", "interrupted"]

#: From the most to the least urgent: what the ranks agree on when they asked for different things.
REASONS: tuple[StopReason, ...] = ("interrupted", "preempted", "stopped")

SIGNALS: dict[signal.Signals, StopReason] = {signal.SIGINT: "interrupted", signal.SIGTERM: "preempted"}


def end_on_sigterm() -> None:
    """End this process at once on SIGTERM, as long as it has no step to finish: nothing would be lost."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is on its way
        raise Preempted("stopped by SIGTERM before the first step: nothing was lost")

    signal.signal(signal.SIGTERM, end)


class StopRequest:
    """Collects wishes to stop on this rank; ``reason`` is set once every rank knows of one."""

    def __init__(self) -> None:
        self.reason: StopReason | None
        self._wished: set[StopReason]
        self.clear()

    def clear(self) -> None:
        """Forget earlier wishes: a new call of fit begins."""
        self.reason, self._wished = None, set()

    def wish(self, reason: StopReason) -> None:
        """Ask to stop at the next agreement."""
        self._wished.add(reason)

    def flags(self) -> list[float]:
        """Return this rank's wishes as numbers to be summed over all ranks."""
        return [float(reason in self._wished) for reason in REASONS]

    def agree(self, summed: Sequence[float]) -> None:
        """Learn what all ranks together wish."""
        self.reason = next((reason for reason, wishes in zip(REASONS, summed, strict=True) if wishes), None)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into a wish; a second one acts as it would without us."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def handle(number: int, frame: FrameType | None) -> None:
            self.wish(SIGNALS[signal.Signals(number)])
            signal.signal(number, before[signal.Signals(number)])

        for number in SIGNALS:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
