"""Forwards signals from the launcher to its ranks, so that they stop together and in order."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

from nanotrain_core.run.progress_bar import is_live
from nanotrain_core.run.stop import EXIT_OF, SIGNALS, announce, is_repeat, stop_signals
from nanotrain_core.watch.hang import kill, pids_of

POLL = 0.1
#: Seconds within which the agent detects that all ranks are gone.
GONE = 3.0


class SignalForwarder:
    """Waits for the agent while forwarding the first of the signals that stop a run to every rank, once.

    A second signal, or the end of the ``grace`` period (seconds), kills the ranks. If there are none yet,
    because the launcher waits for the rendezvous host, it ends this process.
    """

    def __init__(self, scratch: Path, grace: float, *, saves: bool = True) -> None:
        self.scratch, self.grace = scratch, grace
        self.received: signal.Signals | None = None
        self._told: set[int] = set()
        self._announced = not saves
        self._since, self._deadline = 0.0, float("inf")

    def wait(self, agent: Future[Any], meanwhile: Callable[[], None]) -> Any:
        """Return the agent's result; call ``meanwhile`` repeatedly until then."""
        before = {number: signal.signal(number, self._receive) for number in stop_signals()}
        try:
            while not agent.done():
                self._forward()
                meanwhile()
                time.sleep(POLL)
            return agent.result()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            self._deadline = self._since + self.grace
        elif not is_repeat(number, self.received, self._since):
            self._deadline = min(self._deadline, time.monotonic())

    def _forward(self) -> None:
        """Signal ranks that have not been signalled; ranks that start late are signalled late."""
        if self.received is None:
            return
        pids = {*pids_of(self.scratch)} - {0}
        if pids and not self._announced:
            self._announced = True
            if self.received == signal.SIGINT and not is_live(sys.stdout):
                announce(self.grace)  # the user waits; on a terminal rank 0 announces it, above its panel
        if time.monotonic() > self._deadline:
            kill(pids, signal.SIGKILL)
            if not pids and time.monotonic() > self._deadline + GONE:
                shutil.rmtree(self.scratch, ignore_errors=True)
                os._exit(EXIT_OF[SIGNALS[self.received]])
        else:
            kill(pids - self._told, self.received)
        self._told |= pids
