"""A bounded queue and one thread, through which a sink writes without blocking a step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import structlog


class SinkQueue:
    """Calls functions one after another, in the order of :meth:`put`, in a separate thread.

    Calls that do not fit are dropped and counted: :meth:`put` returns immediately, whatever the thread waits
    for. The first drop and the first failure are logged, and their counts at :meth:`close`. A process that is
    killed loses queued calls: data that must not be lost is written in the step itself, as ``jsonl`` does.

    Pass the thread host values only. It may not call collectives, and a device tensor would make it
    wait for the step.
    """

    def __init__(self, name: str, *, size: int = 1024) -> None:
        """Start a thread with the first :meth:`put`.

        Args:
            name: of the sink, for the log.
            size: maximum number of queued calls.
        """
        self.name, self.size = name, size
        self.dropped = self.failed = 0
        """Calls that did not fit, and calls that raised."""
        self.log = structlog.get_logger("nanotrain.monitor")
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[..., None], *arguments: Any, must: bool = False) -> bool:
        """Queue ``call(*arguments)``, and return whether it will be called.

        Args:
            call: may take any time.
            arguments: its arguments.
            must: accept it even if the queue is full: for the few calls without which later ones are
                misinterpreted, such as a rollback.
        """
        with self._changed:
            if self._closed:
                return False
            if len(self._waiting) >= self.size and not must:
                self.dropped += 1
                first = self.dropped == 1
            else:
                self._waiting.append(partial(call, *arguments))
                self._start()
                self._changed.notify_all()
                return True
        if first:
            text = "a sink is too slow: what finds no place in its queue is left out"
            self.log.warning(text, sink=self.name, size=self.size)
        return False

    def flush(self, timeout: float) -> bool:
        """Wait until all calls are done, at most ``timeout`` seconds, and return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, accept no more, and log what was lost. Return whether everything was called."""
        began = time.monotonic()
        self.flush(timeout)
        with self._changed:
            self._closed = True
            late = len(self._waiting) + self._busy
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and not late:
            self._thread.join(max(0.0, timeout - (time.monotonic() - began)))
        if late or self.dropped or self.failed:
            lost = {"dropped": self.dropped, "failed": self.failed, "not_written_in_time": late}
            self.log.warning("a sink has not written everything", sink=self.name, **lost)
        return not (late or self.dropped or self.failed)

    def _start(self) -> None:
        if self._thread is None:
            context = copy_context()  # the log's rank and step
            name = f"nanotrain-{self.name}"
            self._thread = threading.Thread(target=context.run, args=(self._work,), name=name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                call, self._busy = self._waiting.popleft(), True
            try:
                call()
            except Exception as problem:
                self.failed += 1
                if self.failed == 1:
                    text = "a sink failed and the run goes on; later failures are counted"
                    self.log.exception(text, sink=self.name, problem=str(problem))
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
