"""Live lines at the bottom of a terminal, with other output printed above them."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import structlog
from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from nanotrain_core.run.progress_bar import is_live, silent

#: Seconds between two updates.
INTERVAL = 0.25


def restore_cursor() -> None:
    """Show the cursor again, after a killed process had hidden it."""
    if is_live(sys.stdout):
        Console().show_cursor(True)


class LockedConsole(Console):
    """A console that writes the output of one thread completely before another thread prints.

    A print moves the cursor up by the height of the live lines, and then writes. Without a lock, another
    thread could add live lines between the two, and a log line would be overwritten.
    """

    def __init__(self) -> None:
        self._lock_of_prints = threading.RLock()
        super().__init__(highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._lock_of_prints.acquire()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        try:
            super().__exit__(*problem)
        finally:
            self._lock_of_prints.release()


class Screen:
    """Shows lines until it is stopped. Output printed or logged meanwhile goes above them.

    A thread draws: a step only signals that there is something new, and does not wait for the terminal. Other
    processes' output cannot be put above; the next drawing continues below it.
    """

    def __init__(self, lines: Callable[[int, int, bool], list[Text]], console: Console | None = None) -> None:
        """``lines(width, height, ascii_only)`` returns what to show, no line wider than the terminal."""
        self.console = console or LockedConsole()
        self.lines = lines
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),  # output to a file stays in the file
        )
        self._ended, self._alone = threading.Event(), ExitStack()
        self._width, self._shown = 0, list[Text]()
        self._thread = threading.Thread(target=self._draw_on, name="nanotrain-console", daemon=True)

    def start(self) -> None:
        """Start drawing."""
        self._alone.enter_context(silent())
        self.live.start()
        atexit.register(self.stop)  # the cursor is restored however the process ends, unless it is killed
        self._thread.start()

    def print(self, text: str) -> None:
        """Print a line above."""
        self.console.print(text, markup=False)

    def stop(self) -> None:
        """Draw a last time and leave the lines in place."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=5.0)
        self._draw()
        with self.console:
            self.live.stop()
        self._alone.close()
        atexit.unregister(self.stop)

    def _draw_on(self) -> None:
        try:
            while not self._ended.wait(INTERVAL):
                self._draw()
        except Exception:
            structlog.get_logger("nanotrain.monitor").exception("the panel is no longer drawn")

    def _draw(self) -> None:
        """Draw, unless nothing has changed."""
        width, height = self.console.size
        new = self.lines(width, height, self.console.options.ascii_only)
        if new == self._shown and width == self._width:
            return
        if width < self._width:  # the terminal has wrapped the old lines: they take more rows than before
            taller = sum(max(0, -(-line.cell_len // width) - 1) for line in self._shown)
            up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
            self.console.control(Control(*up * taller))
        self._width, self._shown = width, new
        with self.console:  # before the lock of `live`, as a print does
            self.live.update(Group(*new), refresh=True)
