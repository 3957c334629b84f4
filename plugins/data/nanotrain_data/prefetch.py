"""Threads that run tasks before their results are needed, and do not delay the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue

from nanotrain_core.api import DataError


class Prefetch:
    """Runs tasks in the order they are given; a task that is still queued or running is not added again.

    Threads are daemons: tasks that are not done when the process ends are dropped. A DataError is not
    reported here: it is raised when the result is needed.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._queue: SimpleQueue[tuple[Hashable, Callable[[], object]]] = SimpleQueue()
        self._waiting: set[Hashable] = set()
        self._started = False

    def put(self, key: Hashable, task: Callable[[], object]) -> None:
        """Queue a task, unless one with the same key is queued or running."""
        if not self._started:
            self._started = True
            for number in range(self._threads):
                threading.Thread(target=self._work, name=f"nanotrain-fetch-{number}", daemon=True).start()
        if key not in self._waiting:
            self._waiting.add(key)
            self._queue.put((key, task))

    def _work(self) -> None:
        while True:
            key, task = self._queue.get()
            with suppress(DataError):
                task()
            self._waiting.discard(key)
