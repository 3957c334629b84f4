"""Seconds of a device between points of its stream, read late: nothing waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

#: Intervals that wait to be read before the clock looks by itself.
MOST_WAITING = 2048


@attrs.define
class Interval:
    """Between two events, in one part of a step."""

    part: str
    kind: str
    """What it is spent on: empty, the part itself."""
    start: Any
    end: Any


class DeviceClock:
    """Adds up intervals by the part of a step that they began in, and by their kind."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """``make`` returns an event with ``record``, ``query`` and ``elapsed_time``, as torch's."""
        self._make = make
        self._waiting: deque[Interval] = deque()
        self.part = ""
        """What the run is in."""
        self.seconds: dict[tuple[str, str], float] = {}
        """By part and kind, as far as they were read."""

    def now(self) -> Any:
        """Return an event at the end of what the current stream has been given."""
        event = self._make()
        event.record()
        return event

    def add(self, kind: str, start: Any, end: Any) -> None:
        """Count the time between two events of a stream, once the device has come to the second."""
        self._waiting.append(Interval(self.part, kind, start, end))
        if len(self._waiting) > MOST_WAITING:
            self.read()

    def read(self) -> None:
        """Add up all intervals that are over by now."""
        while self._waiting and self._waiting[0].end.query():
            each = self._waiting.popleft()
            key = each.part, each.kind
            self.seconds[key] = self.seconds.get(key, 0.0) + each.start.elapsed_time(each.end) / 1000
