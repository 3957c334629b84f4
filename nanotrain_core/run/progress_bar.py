"""Shows progress of slow operations: a bar on a terminal, elsewhere a ``key=value`` line every ten seconds.

Torch-free, on standard error, in rank 0's process alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: Seconds before a bar is shown, and between two lines: faster operations show nothing.
SOON, OFTEN = 0.5, 10.0

#: Reports how much more is done.
Advance = Callable[[float], None]

_shown = threading.Lock()
"""Held by the operation that is shown: nested operations show nothing."""


@contextlib.contextmanager
def show_progress(what: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Show ``what`` until the block ends. Yields a function to call with how much more is done::

        with show_progress("tokenizing", total=size, unit="B") as advance:
            for document in documents:
                ...
                advance(len(document))

    Args:
        what: such as ``"tokenizing"``.
        total: the total amount; None if unknown, or if nothing is counted.
        unit: of ``total``: ``"B"`` is shown as kB, MB and GB.
    """
    import structlog  # imports rich, which `nanotrain --help` avoids

    first = structlog.contextvars.get_contextvars().get("rank", 0) == 0
    if not first or not _shown.acquire(blocking=False):
        yield lambda more: None
        return
    try:
        job = _Job(what, total, unit)
        show = job.draw if is_live(sys.stderr) else job.tell
        thread = threading.Thread(target=show, name="nanotrain-working", daemon=True)
        thread.start()
        try:
            yield job.advance
        finally:
            job.ended.set()
            thread.join()
    finally:
        _shown.release()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep :func:`show_progress` silent within the block: a panel on the terminal shows the progress."""
    held = _shown.acquire(blocking=False)
    try:
        yield
    finally:
        if held:
            _shown.release()


def is_live(stream: object) -> bool:
    """Return whether a stream is a terminal whose user wants more than plain lines."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb", "unknown")
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and not plain


class _Job:
    """The progress of one operation. Updated by one thread, shown by another."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0.0
        self.ended = threading.Event()
        self.began = time.monotonic()

    def advance(self, more: float) -> None:
        self.done += more

    def tell(self) -> None:
        """Log a line periodically."""
        import structlog

        log = structlog.get_logger("nanotrain")
        while not self.ended.wait(OFTEN):
            log.info(self.what, **self.fields())

    def fields(self) -> dict[str, str | int]:
        """Return the progress."""
        seconds = round(time.monotonic() - self.began)
        if not self.total:
            return {"seconds": seconds}
        done = amount(self.done, "B" if self.unit == "B" else "")
        total = amount(self.total, self.unit)
        return {"done": done, "of": total, "percent": int(100 * self.done / self.total), "seconds": seconds}

    def draw(self) -> None:
        """Show a bar that is removed at the end."""
        if self.ended.wait(SOON):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if self.total:
            columns += [BarColumn(24), TextColumn("{task.fields[counted]}")]
        with Progress(
            *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=False
        ) as progress:
            task = progress.add_task(self.what, total=self.total, counted="")
            while True:
                fields = self.fields()
                counted = f"{fields['done']} of {fields['of']}" if self.total else ""
                progress.update(task, completed=self.done, counted=counted, refresh=True)
                if self.ended.wait(0.1):
                    return


def amount(number: float, unit: str) -> str:
    """Return a human-readable amount.

    >>> [amount(3e9, "B"), amount(1234, "B"), amount(7, ""), amount(2, "files")]
    ['3.0 GB', '1.2 kB', '7', '2 files']
    """
    if unit != "B":
        return f"{number:g} {unit}".strip()
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {prefix}B"
    return f"{number:.0f} B"
