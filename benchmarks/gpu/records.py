"""What a part found, line by line in a file, so that a part that dies leaves what it had measured."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Lines of an error that are shown.
LAST = 6

Record = dict[str, Any]


class Recorder:
    """Appends records of four kinds: ``row`` of a table, ``bar``, ``left out``, ``problem``."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def row(self, table: str, *, ok: bool | None = None, **cells: Any) -> None:
        """Add a row to a table; the names of its ``cells`` are the columns. ``ok`` None: it has no bar."""
        self._write(kind="row", table=table, passed=ok, cells=cells)

    def bar(self, bar: str, value: float) -> None:
        """Say what was measured for one of :data:`benchmarks.gpu.bars.BARS`."""
        self._write(kind="bar", bar=bar, value=value)

    def left_out(self, name: str, why: str, *bars: str) -> None:
        """Say what was not run, and which ``bars`` wait for it."""
        self._write(kind="left out", name=name, why=why, bars=bars)

    def problem(self, name: str, text: str, *bars: str) -> None:
        """Say what failed, and which ``bars`` have no figure for it."""
        self._write(kind="problem", name=name, text=text, bars=bars)

    def data(self, name: str, value: Any) -> None:
        """Keep what no table shows, for the JSON file."""
        self._write(kind="data", name=name, value=value)

    @contextmanager
    def attempt(self, name: str, *bars: str) -> Iterator[None]:
        """Let what fails in here be a problem by this name, and what comes after it go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.problem(name, told(error), *bars)

    def _write(self, **record: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            os.fsync(lines.fileno())


def told(error: BaseException) -> str:
    """Return an error's kind and its first line, and the last lines of a long one."""
    first, *more = filled_lines(f"{type(error).__name__}: {error}")
    return "\n".join([first, *more[1 - LAST :]])


def last_lines(text: str) -> str:
    """Return the last few lines of ``text`` that hold something."""
    return "\n".join(filled_lines(text)[-LAST:])


def filled_lines(text: str) -> list[str]:
    """Return the lines of ``text`` that hold something."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def last_words(log: str) -> str:
    """Return the last lines of a log; of a process that was ended, where its main thread was."""
    _, timeout, stacks = log.rpartition("Timeout (")
    if not timeout:
        return last_lines(log)
    main = stacks.rpartition("Thread 0x")[2] or stacks
    return "\n".join(main.splitlines()[1 : 1 + LAST])


def read(file: Path) -> list[Record]:
    """Return the records of ``file`` that are whole: whoever wrote it may have been killed in the last."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
