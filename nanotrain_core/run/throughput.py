"""How fast a run goes, leaving out what is not training."""

from __future__ import annotations

import time


class Throughput:
    """Seconds per step since it was last asked or restarted."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure from here: what came before was not training."""
        self._began, self._step = time.monotonic(), step

    def seconds_per_step(self, step: int, *, restart: bool = True) -> float:
        """Return the mean since the last restart, after ``step`` steps in all, and measure from here."""
        seconds = (time.monotonic() - self._began) / max(1, step - self._step)
        if restart:
            self.restart(step)
        return seconds
