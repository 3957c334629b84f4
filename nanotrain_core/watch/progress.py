"""Where a rank's run is: noted by the engine, read by the watchdog."""

from __future__ import annotations

import time

#: Phases that may rightly take long: everything before training, and writing to a slow disk.
SLOW = frozenset({"start", "checkpoint"})


class Progress:
    """Counts what a rank has begun. All ranks of a run note the same things in the same order."""

    def __init__(self) -> None:
        self.count, self.step, self.phase, self.slow = 0, 0, "start", True
        self.seconds: dict[str, float] = {}
        """Spent in each phase so far, by the host's clock."""
        self._since = time.monotonic()

    def note(self, phase: str, step: int = 0, *, first: bool = False) -> None:
        """Note that ``phase`` of ``step`` begins; the ``first`` step compiles and warms up."""
        now = time.monotonic()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self._since = now
        self.step, self.phase = step, phase
        self.slow = first or phase in SLOW
        self.count += 1  # last: a reader that sees the count sees the rest
