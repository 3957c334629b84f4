"""Threads that do ahead of time what will be asked for, and keep nobody waiting at an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue

from nanotrain_core.api import DataError


class Prefetch:
    """Does tasks in the order they are given, each once at a time.

    Threads are daemons: a process that ends leaves what is not done. What fails is silent here, and told when
    it is asked for.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._queue: SimpleQueue[tuple[Hashable, Callable[[], object]]] = SimpleQueue()
        self._waiting: set[Hashable] = set()
        self._started = False

    def put(self, key: Hashable, task: Callable[[], object]) -> None:
        """Do a task, unless one of its key is waiting."""
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
