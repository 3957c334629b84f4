"""Structured logging: ``key=value`` for people on standard error, JSON in ``run.log.jsonl``.

All messages of a run go through here: structlog in ranks and plugins, and :func:`say` where there is no
logger, as in a launcher or during a hang. The file has the entries of rank 0 from level ``info``,
of other ranks and launchers from ``warning``, each with time, rank, step, level, event and its own
fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from nanotrain_core.recipe.secrets import without_secrets
from nanotrain_core.run.files import append_line

FILE = "run.log.jsonl"

#: Size in bytes at which a resumed run starts a new file; the previous one is kept as ``run.log.1.jsonl``.
LARGEST = 64 * 2**20

#: From the least to the most severe.
LEVELS = ("debug", "info", "warning", "error", "critical")


class LogFile:
    """The log file of a run folder, to which all ranks append, each line in one write."""

    def __init__(self, folder: Path, rank: int | None, step: Callable[[], int]) -> None:
        """Write nothing before :meth:`begin`: a rejected run leaves its folder unchanged.

        A launcher writes to the file of a run that has begun.

        Args:
            folder: of the run.
            rank: None for a launcher.
            step: returns the run's current step.
        """
        self.path, self.rank, self.step = folder / FILE, rank, step
        self.least = LEVELS.index("info" if rank == 0 else "warning")
        self._waiting: list[str] | None = [] if rank is not None else None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Write the entries logged so far; from now on write immediately."""
        with self._lock, contextlib.suppress(OSError):
            if self.rank == 0 and self.path.exists() and self.path.stat().st_size > LARGEST:
                os.replace(self.path, self.path.with_name("run.log.1.jsonl"))
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._append(line)

    def write(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Add an entry, if it is severe enough. On a full disk lines are lost, but nothing fails."""
        level = level if level in LEVELS else "error"
        if LEVELS.index(level) < self.least:
            return
        own = {key: value for key, value in fields.items() if key not in ("time", "rank", "level", "event")}
        now = datetime.now(UTC).isoformat()
        first = {"time": now, "rank": self.rank, "step": self.step(), "level": level, "event": event}
        line = json.dumps(first | {key: _as_json(value) for key, value in own.items()})
        if self._waiting is None:
            self._append(line)
        else:
            self._waiting.append(line)

    def _append(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            append_line(self.path, line, create=self.rank is not None)


def _as_json(value: Any) -> Any:
    """Return ``value`` as JSON: what JSON cannot represent becomes text, such as ``NaN``."""
    try:
        return json.loads(json.dumps(value, default=str), parse_constant=str)
    except (TypeError, ValueError, RecursionError):  # keys that are not text, or a cycle
        return repr(value)


_file: LogFile | None = None


@contextlib.contextmanager
def kept_in(
    folder: Path | None, rank: int | None, step: Callable[[], int] = lambda: 0
) -> Iterator[LogFile | None]:
    """Also log what this process logs within the block to a run folder, if there is one."""
    global _file  # noqa: PLW0603 logging is a process's, as structlog's own configuration
    before = _file
    _file = LogFile(folder, rank, step) if folder is not None else before
    try:
        yield _file
    finally:
        _file = before


def begin(**fields: Any) -> None:
    """Create the file when a run begins, with an entry for the command and where it runs."""
    if _file is not None:
        _file.begin()
    where = {"host": socket.gethostname(), "cpus": os.cpu_count(), "python": platform.python_version()}
    if here := os.environ.get("LOCAL_WORLD_SIZE"):  # the number of ranks on this host
        where["local_ranks"] = int(here)
    command = without_secrets(shlex.join(sys.argv))
    record("info", "run begins", **fields, command=command, **where, system=platform.platform())


def record(level: str, event: str, **fields: Any) -> None:
    """Add an entry only to the file: the terminal shows it in another way."""
    if _file is not None:
        _file.write(level, event, fields)


def say(text: str, *, level: str = "error") -> None:
    """Write to standard error, and to the file if there is one."""
    print(f"nanotrain: {text}", file=sys.stderr, flush=True)
    record(level, text)


def _settings() -> dict[str, Any]:
    """Return structlog's settings. Its list of processors is copied: ``capture_logs`` changes it in place."""
    found = structlog.get_config()
    return {**found, "processors": [*found["processors"]]}


#: Those of structlog itself; None if another module configured it before this one was imported.
_DEFAULTS = None if structlog.is_configured() else _settings()


def ensure(rank: int) -> None:
    """Configure logging unless it is: structlog's default prints all local variables of a failure.

    Left alone by its user, structlog may count as configured: its ``capture_logs`` has that side effect.
    """
    if not structlog.is_configured() or _settings() == _DEFAULTS:
        configure(rank)


def configure(rank: int) -> None:
    """Set up structlog for one rank's process: ``key=value`` pairs, times in UTC."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _keep,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "event"], bool_as_flag=False
            ),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # looked up when a line is written
    )
    structlog.contextvars.bind_contextvars(rank=rank)


def _keep(logger: Any, method: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add a log entry to the file before it is printed."""
    own = {key: value for key, value in entry.items() if key != "timestamp"}
    if _file is not None:
        _file.write(str(entry.get("level", method)), str(entry.get("event", "")), own)
    return entry
