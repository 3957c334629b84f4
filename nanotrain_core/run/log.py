"""Structured log lines on standard error, each with the rank it came from."""

from __future__ import annotations

import sys

import structlog


def ensure(rank: int) -> None:
    """Configure logging unless somebody has: structlog's default shows all local variables of a failure."""
    if not structlog.is_configured():
        configure(rank)


def configure(rank: int) -> None:
    """Set up structlog for one rank's process: ``key=value`` pairs, times in UTC."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "event"], bool_as_flag=False
            ),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is when a line is written
    )
    structlog.contextvars.bind_contextvars(rank=rank)
