"""Prints findings: for a person, or as JSON for a bug report."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.api import PIPED_WIDTH, Exit
from nanotrain_doctor.findings import STATUSES, Finding, worst
from nanotrain_doctor.redact import environment_to_tell, redacted

COLORS = {"good": "green", "note": "dim", "warning": "yellow", "bad": "bold red"}


def exit_code(found: Sequence[Finding]) -> int:
    """Return 0 if nothing is bad, 1 otherwise."""
    return Exit.FAILED if worst(found) == "bad" else Exit.DONE


def show(found: Sequence[Finding]) -> None:
    """Print a line for each, with what to do below those that ask for it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in found:
        text = escape(f"{each.host}: {each.text}" if each.host else each.text)
        if each.remedy:
            text += f"\n-> {escape(each.remedy)}"
        color = COLORS[each.status]
        table.add_row(f"[{color}]{each.status}[/{color}]", escape(each.check), text)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(table)
    counts = {status: sum(each.status == status for each in found) for status in reversed(STATUSES)}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


def to_json(found: Sequence[Finding], **more: Any) -> str:
    """Return all that a bug report needs, without keys, users in URLs, or the user's name."""
    table: Mapping[str, Any] = {
        "version": "1.1",
        "host": socket.gethostname(),
        "exit_code": exit_code(found),
        "findings": [attrs.asdict(each) for each in found],
        "environment": environment_to_tell(os.environ),
        **more,
    }
    return json.dumps(redacted(json.loads(json.dumps(table, default=str))), indent=1)
