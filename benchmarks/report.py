"""Results as Markdown tables, which read well on a terminal too, and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from benchmarks.bubble import Bubble
from benchmarks.race import Result, Speed
from benchmarks.startup import Wait
from nanotrain_core.files import write_text_atomically

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def machine() -> str:
    """Name the processor, its cores, and the versions that matter."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores; torch {version('torch')}, Python {platform.python_version()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(
    results: Sequence[Result],
    waits: Sequence[Wait],
    speeds: Sequence[Speed] = (),
    bubbles: Sequence[Bubble] = (),
) -> str:
    """Return the machine and a table for each kind of result."""
    parts = [machine()]
    if results:
        header = ["case", "peer", "ranks", "threads", "ours", "peer's", "ratio", "spread", "bar", ""]
        parts.append("Tokens/s, medians over rounds; the ratio is the median of each round's.")
        parts.append(table(header, [_result_row(result) for result in results]))
    if speeds:
        parts.append("Tokens/s alone.")
        header = ["case", "ranks", "threads", "median", "spread"]
        parts.append(table(header, [_speed_row(speed) for speed in speeds]))
    if waits:
        parts.append("Seconds, medians.")
        header = ["command", "until", "seconds", "spread", "limit", ""]
        parts.append(table(header, [_wait_row(wait) for wait in waits]))
    if bubbles:
        header = ["schedule", "ranks", "idle, measured", "simulated", ""]
        parts.append("Idle share of a pipeline of equal stages, 8 microbatches.")
        parts.append(table(header, [_bubble_row(bubble) for bubble in bubbles]))
    return "\n\n".join(parts)


def _result_row(result: Result) -> list[str]:
    case = result.case
    spread = f"{min(result.ratios):.2f} to {max(result.ratios):.2f}"
    speeds = [f"{result.ours:,.0f}", f"{result.peer:,.0f}"]
    numbers = [*speeds, f"{result.ratio:.2f}", spread, f"{case.bar:.1f}"]
    return [case.name, case.peer, str(case.ranks), str(case.threads), *numbers, _verdict(result.passed)]


def _speed_row(speed: Speed) -> list[str]:
    spread = f"{min(speed.rounds):,.0f} to {max(speed.rounds):,.0f}"
    case = speed.case
    return [case.name, str(case.ranks), str(case.threads), f"{median(speed.rounds):,.0f}", spread]


def _wait_row(wait: Wait) -> list[str]:
    spread = f"{_seconds(min(wait.seconds))} to {_seconds(max(wait.seconds))}"
    numbers = [_seconds(median(wait.seconds)), spread, f"{wait.limit:g}"]
    return [f"`{wait.command}`", wait.until, *numbers, _verdict(wait.passed)]


def _seconds(number: float) -> str:
    return f"{number:.2f}" if number >= 0.01 else f"{number:.4f}"


def _bubble_row(bubble: Bubble) -> list[str]:
    shares = [f"{bubble.measured:.1%}", f"{bubble.simulated:.1%}"]
    verdict = _verdict(bubble.passed) if bubble.counts else f"ranks share {bubble.cores} cores"
    return [bubble.schedule, str(bubble.pp), *shares, verdict]


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def write_json(
    path: Path,
    results: Sequence[Result],
    waits: Sequence[Wait],
    speeds: Sequence[Speed] = (),
    bubbles: Sequence[Bubble] = (),
) -> None:
    """Write every measurement."""
    races: list[dict[str, Any]] = [
        {
            "case": result.case.name,
            "peer": result.case.peer,
            "ranks": result.case.ranks,
            "threads": result.case.threads,
            "precision": result.case.precision,
            "tokens_per_second": result.ours,
            "peer_tokens_per_second": result.peer,
            "ratios": result.ratios,
            "ratio": result.ratio,
            "bar": result.case.bar,
            "passed": result.passed,
        }
        for result in results
    ]
    startup = [
        {
            "command": wait.command,
            "until": wait.until,
            "seconds": wait.seconds,
            "limit": wait.limit,
            "passed": wait.passed,
        }
        for wait in waits
    ]
    alone = [{"case": s.case.name, "ranks": s.case.ranks, "tokens_per_second": s.rounds} for s in speeds]
    document = {"machine": machine(), "races": races, "alone": alone, "startup": startup}
    document["bubbles"] = [attrs.asdict(bubble) for bubble in bubbles]
    write_text_atomically(path, json.dumps(document, indent=2) + "\n")


def write_markdown(path: Path, text: str) -> None:
    """Put ``text`` between the two markers of an existing file.

    Raises:
        ValueError: the file does not have both markers, in order.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} needs the lines {BEGIN} and {END} around its table")
    write_text_atomically(path, f"{before}{BEGIN}\n{text}\n{END}{after}")
