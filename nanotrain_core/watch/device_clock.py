"""Device time between points of a stream, read late without synchronization."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

#: Number of unread intervals after which the clock reads by itself.
MOST_WAITING = 2048


@attrs.define
class Interval:
    """The time between two events, in one part of a step."""

    part: str
    kind: str
    """What it is spent on: empty, the part itself."""
    start: Any
    end: Any


class DeviceClock:
    """Accumulates intervals by the part of a step in which they began, and by their kind."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """``make`` returns an event with ``record``, ``query`` and ``elapsed_time``, like torch's."""
        self._make = make
        self._waiting: deque[Interval] = deque()
        self.part = ""
        """The current part of the run."""
        self.seconds: dict[tuple[str, str], float] = {}
        """By part and kind, as far as they have been read."""

    def now(self) -> Any:
        """Return an event at the end of the work queued on the current stream."""
        event = self._make()
        event.record()
        return event

    def add(self, kind: str, start: Any, end: Any) -> None:
        """Count the time between two events of a stream, once the device has reached the second."""
        self._waiting.append(Interval(self.part, kind, start, end))
        if len(self._waiting) > MOST_WAITING:
            self.read()

    def read(self) -> None:
        """Add up all intervals that have completed."""
        while self._waiting and self._waiting[0].end.query():
            each = self._waiting.popleft()
            key = each.part, each.kind
            self.seconds[key] = self.seconds.get(key, 0.0) + each.start.elapsed_time(each.end) / 1000
