"""Breakdown of a run's wall-clock time since its first start, kept in the run folder. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import attrs

FILE = "goodput.json"


@attrs.define
class Ledger:
    """Seconds and counts of all attempts of a run."""

    began: float = attrs.field(factory=time.time)
    """Start of the first attempt, in seconds since 1970."""
    seen: float = attrs.field(factory=time.time)
    """Time of the last entry, in seconds since 1970. Within an attempt it advances by a monotonic clock."""
    first: int = 0
    """Steps done when the ledger began."""
    step: int = 0
    """Steps done when the last entry was made."""
    restarts: int = 0
    rollbacks: int = 0
    lost_steps: int = 0
    saved_at: float = 0.0
    """When the newest checkpoint was complete; 0: never."""
    productive: float = 0.0
    """Seconds of steps that were kept, without waiting for data."""
    start: float = 0.0
    data: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    redone: float = 0.0
    """Of steps that were lost."""
    down: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds since the first start, until the last entry."""
        return max(self.seen - self.began, 1e-9)

    def pass_time(self, seconds: float, *, step: int, **beside: float) -> None:
        """Add ``seconds`` that passed until ``step``; ``beside``: those not spent on training, by field."""
        for name, each in beside.items():
            setattr(self, name, getattr(self, name) + each)
        # A device's clock is read late: its earlier waits were counted as training, and are subtracted now.
        self.productive = max(0.0, self.productive + seconds - sum(beside.values()))
        self.seen, self.step = self.seen + seconds, step

    def go_back(self, to: int) -> None:
        """Record that steps after ``to`` are computed again, assuming that each took the mean of all."""
        lost = max(0, self.step - to)
        share = lost / (self.step - self.first) if lost else 0.0
        gone = self.productive * min(1.0, share)
        self.productive, self.redone = self.productive - gone, self.redone + gone
        self.lost_steps, self.step = self.lost_steps + lost, to
        self.first = min(self.first, to)

    def begin_again(self, now: float, first_step: int) -> None:
        """Enter an attempt that begins ``now``, by the date, from the checkpoint of ``first_step``."""
        self.go_back(first_step)
        self.restarts += 1
        self.down += max(0.0, now - self.seen)
        self.seen = max(self.seen, now)


def read(folder: Path) -> Ledger | None:
    """Return what earlier attempts left; None if there is nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Ledger(**{str(name): float(value) for name, value in found.items()})  # type: ignore[arg-type]
    return None


def write(folder: Path, ledger: Ledger) -> None:
    """Write the ledger for the next attempt, atomically, but without fsync: a power failure may lose it."""
    temporary = folder / f".{FILE}"
    with contextlib.suppress(OSError):  # a full disk is reported by the run's saves
        temporary.write_text(json.dumps(attrs.asdict(ledger), indent=1), encoding="utf-8")
        os.replace(temporary, folder / FILE)
