"""A rank's position and time in the run: recorded by the engine, read by watchdog and monitors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from nanotrain_core.watch.device_clock import DeviceClock
from nanotrain_core.watch.waits import Waits

#: The phases before training, and after a failure.
START, FAILED = "start", "failed"
#: Phases that may legitimately take long: everything before training, and writing to a slow disk.
SLOW = frozenset({START, "checkpoint"})


@attrs.define
class TimeSpent:
    """Seconds of one part of a run so far."""

    seconds: float = 0.0
    collectives: float = 0.0
    """Seconds of these in collectives: see :mod:`nanotrain_core.watch.waits`."""
    messages: float = 0.0
    """Seconds of these waiting for messages from other pipeline stages."""

    @property
    def busy(self) -> float:
        """Seconds of the rank's own work."""
        return self.seconds - self.collectives - self.messages

    def since(self, before: TimeSpent | None) -> TimeSpent:
        """Return what was added after ``before``."""
        if before is None:
            return TimeSpent(self.seconds, self.collectives, self.messages)
        return TimeSpent(
            self.seconds - before.seconds,
            self.collectives - before.collectives,
            self.messages - before.messages,
        )


class Progress:
    """Counts what a rank has begun. All ranks of a run record the same events in the same order."""

    def __init__(self, waits: Waits | None = None) -> None:
        """``waits``: the communication that the run's mesh counts."""
        self.count, self.step, self.phase, self.slow = 0, 0, START, True
        self.waits = waits or Waits()
        self.spent: dict[str, TimeSpent] = {}
        """Time of each part so far, by the host's clock. The current part is incomplete."""
        self._part = START
        self._since = time.perf_counter()
        self._waited = (0.0, 0.0)
        self._event: Any = None

    def note(self, phase: str, step: int = 0, *, first: bool = False) -> None:
        """Record that ``phase`` of ``step`` begins; the ``first`` step compiles and warms up."""
        self.go_to(phase)
        self.step, self.phase = step, phase
        self.slow = first or phase in SLOW
        self.count += 1  # last: a reader that sees the count sees the rest

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the time of a ``with`` block as that of ``part``, not of the current phase."""
        outer = self.go_to(part)
        try:
            yield
        finally:
            self.go_to(outer)

    def go_to(self, part: str) -> str:
        """End the current part; return its name."""
        now, outer = time.perf_counter(), self._part
        waited = (self.waits.collectives.seconds, self.waits.messages.seconds)
        spent = self.spent.get(outer)
        if spent is None:
            spent = self.spent[outer] = TimeSpent()
        spent.seconds += now - self._since
        spent.collectives += waited[0] - self._waited[0]
        spent.messages += waited[1] - self._waited[1]
        self._part, self._since, self._waited = part, now, waited
        if self.waits.device is not None:
            event = self.waits.device.now()
            self.waits.device.add("", self._event, event)
            self.waits.device.part, self._event = part, event
        return outer

    # --- on a device ----------------------------------------------------------------------------

    def time_device(self, device: Any) -> None:
        """Measure parts and communication by the device's clock too; a no-op if the device is the host.

        Args:
            device: a ``torch.device``.
        """
        if device.type == "cpu" or self.waits.device is not None:
            return
        import torch  # the watchdog uses this class without torch

        self.use_clock(DeviceClock(lambda: torch.Event(device, enable_timing=True)))

    def use_clock(self, clock: DeviceClock) -> None:
        """Also measure by ``clock`` from now on."""
        clock.part, self._event = self._part, clock.now()
        self.waits.device = clock

    def work(self, *parts: str) -> float:
        """Return the seconds of a rank's own work in ``parts`` so far, as in :meth:`measured`."""
        spent = self._by_clock()
        return sum(spent[part].busy for part in parts if part in spent)

    def measured(self) -> Mapping[str, TimeSpent]:
        """Return the time spent, by the clock of what computes: the device's if it is timed, else the host's.

        The device's is read late, without all of the last steps. A device that waits for the host, as for
        data, is counted in the host's current part.
        """
        return {part: spent.since(None) for part, spent in self._by_clock().items()}

    def measured_in(self, part: str) -> TimeSpent:
        """Return the time spent in one part, as in :meth:`measured`."""
        return self._by_clock().get(part, TimeSpent()).since(None)

    def _by_clock(self) -> Mapping[str, TimeSpent]:
        """Return :meth:`measured` without a copy: on the host, :attr:`spent` itself."""
        clock = self.waits.device
        if clock is None:
            return self.spent
        clock.read()
        found: dict[str, TimeSpent] = {}
        for (part, kind), seconds in clock.seconds.items():
            setattr(found.setdefault(part, TimeSpent()), kind or "seconds", seconds)
        return found
