"""Measures how long a rank communicates with other ranks: the rest of a phase is its own work.

All ranks of a run take the same time for a step. A slow one works; the others wait for it, in the next
collective or for the next message. So the rank that waits least is the slowest, wherever the time goes.

On a CPU the host's seconds in communication calls and in waiting for them are counted: communication in the
background is not. On a device the host hardly waits; there, if enabled, a pair of events around each
communication measures how long the stream was blocked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec

from nanotrain_core.watch.device_clock import DeviceClock

P = ParamSpec("P")

#: Collectives of any group, and messages between pipeline stages.
Kind = Literal["collectives", "messages"]


class Wait:
    """A ``with`` block in which this rank communicates; nested blocks count nothing."""

    def __init__(self, waits: Waits, kind: Kind) -> None:
        self._waits, self._kind = waits, kind
        self.seconds = 0.0
        """Time spent in these blocks so far, by the host's clock."""

    def __enter__(self) -> None:
        waits = self._waits
        waits.depth += 1
        if waits.depth == 1:
            self._began = time.perf_counter()
            self._event = waits.device.now() if waits.device else None

    def __exit__(self, *problem: object) -> None:
        waits = self._waits
        waits.depth -= 1
        if waits.depth == 0:
            self.seconds += time.perf_counter() - self._began
            if waits.device is not None and self._event is not None:
                waits.device.add(self._kind, self._event, waits.device.now())


class Waits:
    """A rank's communication in one run, each call wrapped in ``with waits.collectives:``."""

    def __init__(self) -> None:
        self.depth = 0
        self.collectives, self.messages = Wait(self, "collectives"), Wait(self, "messages")
        self.device: DeviceClock | None = None
        """The clock that times communication on the device too; None: it is not enabled."""

    def timed(self, begin: Callable[P, Any]) -> Callable[P, Any]:
        """Return ``begin``, timed, as well as the function it may return, which waits for completion."""

        def ended(pending: Callable[[], Any]) -> Any:
            with self.collectives:
                return pending()

        @wraps(begin)
        def counted(*args: P.args, **kwargs: P.kwargs) -> Any:
            with self.collectives:
                pending = begin(*args, **kwargs)
            return (lambda: ended(pending)) if callable(pending) else pending

        return counted
