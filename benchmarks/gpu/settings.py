"""What every part is told: the device, how much time it has, what it may leave on disk."""

from __future__ import annotations

import time
from pathlib import Path

import attrs


@attrs.define(frozen=True, kw_only=True)
class Settings:
    """Of one part. Plain values, which survive the way into another process."""

    smoke: bool = False
    """Tiny sizes on a CPU: to see that everything runs."""
    records: Path
    deadline: float = float("inf")
    """By ``time.monotonic()``: a part that can measures less when it comes near."""
    start: str = "forkserver"
    """How processes are started."""
    nanogpt: Path | None = None
    """A clone."""
    profile: Path | None = None
    """A folder, for where time goes."""
    memory: float = 80.0
    """GB of the device."""
    device_name: str = ""

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def judged(self, passed: bool) -> bool | None:
        """Return what a row says of a time and its bar: nothing where no time means anything."""
        return None if self.smoke else passed

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()
