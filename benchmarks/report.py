"""Results as Markdown tables, which read well on a terminal too, and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Protocol

from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.host_processors import usable_processors

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def machine() -> str:
    """Name the processor, its cores, and the versions that matter."""
    cores = usable_processors()
    return f"{_processor()}, {cores} cores; torch {version('torch')}, Python {platform.python_version()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Measured(Protocol):
    """One row of a table. Rows of one kind stand together."""

    KIND: ClassVar[str]
    TITLE: ClassVar[str]
    HEADER: ClassVar[Sequence[str]]

    @property
    def passed(self) -> bool:
        """Whether it meets its bar; true without one."""
        ...

    def row(self) -> list[str]:
        """Return a cell for each of ``HEADER``."""
        ...

    def data(self) -> Mapping[str, Any]:
        """Return every measurement, as JSON."""
        ...


def verdict(passed: bool) -> str:
    """Return the last cell of a row that has a bar."""
    return "pass" if passed else "FAIL"


def spread(numbers: Iterable[float], form: str) -> str:
    """Return the smallest and the largest of ``numbers``, each formatted as ``form``."""
    found = sorted(numbers)
    return f"{found[0]:{form}} to {found[-1]:{form}}"


def by_kind(measured: Iterable[Measured]) -> list[tuple[str, list[Measured]]]:
    """Return rows of each kind, which follow one another."""
    return [(kind, list(rows)) for kind, rows in groupby(measured, lambda each: each.KIND)]


def markdown(measured: Iterable[Measured]) -> str:
    """Return the machine and a table for each kind."""
    parts = [machine()]
    for _, rows in by_kind(measured):
        parts += [rows[0].TITLE, table(rows[0].HEADER, [each.row() for each in rows])]
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def write_json(path: Path, measured: Iterable[Measured]) -> None:
    """Write every measurement."""
    kinds = {kind: [each.data() for each in rows] for kind, rows in by_kind(measured)}
    write_text_atomically(path, json.dumps({"machine": machine(), **kinds}, indent=2) + "\n")


def write_markdown(path: Path, text: str, what: str = "measured") -> None:
    """Put ``text`` between two markers of an existing file, of which a page may have several pairs.

    Raises:
        ValueError: the file does not have both markers, in order.
    """
    first, last = (marker.replace("measured", what) for marker in (BEGIN, END))
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} needs the lines {first} and {last} around its table")
    write_text_atomically(path, f"{before}{first}\n{text}\n{last}{after}")
