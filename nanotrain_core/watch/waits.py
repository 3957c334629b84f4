"""How long a rank is in exchanges with other ranks: what is left of a phase is its own work.

All ranks of a run take the same time for a step. A slow one works; the others wait for it, in the next
collective or for the next message. So whoever waits least is the slowest, wherever the time goes.

On a CPU the host's seconds in calls of exchanges, and in waiting for them, are counted: what goes on in the
background meanwhile is not. On a device the host hardly waits; there, if asked, a pair of events around each
exchange tells how long the stream stood still.
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
    """A ``with`` block in which this rank exchanges; within another one it counts nothing."""

    def __init__(self, waits: Waits, kind: Kind) -> None:
        self._waits, self._kind = waits, kind
        self.seconds = 0.0
        """By the host's clock, so far."""

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
    """A rank's exchanges, of one run. ``with waits.collectives:`` stands around each."""

    def __init__(self) -> None:
        self.depth = 0
        self.collectives, self.messages = Wait(self, "collectives"), Wait(self, "messages")
        self.device: DeviceClock | None = None
        """Times them on the device too, if somebody asked for it."""

    def around(self, begin: Callable[P, Any]) -> Callable[P, Any]:
        """Return ``begin``, counted, and with it the function that it may return, which waits for its end."""

        def ended(pending: Callable[[], Any]) -> Any:
            with self.collectives:
                return pending()

        @wraps(begin)
        def counted(*args: P.args, **kwargs: P.kwargs) -> Any:
            with self.collectives:
                pending = begin(*args, **kwargs)
            return (lambda: ended(pending)) if callable(pending) else pending

        return counted
