"""``nanotrain metrics``: what the core and the installed monitors measure, and which values are good."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from nanotrain_core.cli.common import add_plugin_options, plugin_arguments
from nanotrain_core.errors import Exit
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import Metric
from nanotrain_core.registry.registry import Registry, load_plugins

#: Columns of the table when no terminal limits it.
PIPED_WIDTH = 1000

COLUMNS = ("metric", "of", "unit", "over ranks", "level", "cost", "what it is", "rule")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table for each group")
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print what is declared."""
    asked = plugin_arguments(args)
    found = by_group(load_plugins(block=asked.blocked, local=asked.local))
    if args.json:
        print(json.dumps([{"of": of, **attrs.asdict(metric)} for of, metric in found], indent=2))
    elif args.markdown:
        print(markdown(found))
    else:
        _print_table(found)
    return Exit.DONE


def by_group(registry: Registry) -> list[tuple[str, Metric]]:
    """Return all metrics, each after who tells it: ``core``, or the name of a monitor."""
    found = [("core", metric) for metric in CORE]
    for use in registry.names("monitor"):
        found += [(use, metric) for metric in registry.get("monitor", use).metrics]
    return sorted(found, key=lambda each: each[1].group)


def markdown(found: list[tuple[str, Metric]]) -> str:
    """Return tables under a heading for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(metric.group for _, metric in found):
        lines += [f"### {group}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        mine = [_row(of, metric) for of, metric in found if metric.group == group]
        lines += [f"| `{first}` | {' | '.join(rest)} |" for first, *rest in mine] + [""]
    return "\n".join(lines).strip()


def _row(of: str, metric: Metric) -> tuple[str, ...]:
    over = metric.reduce if metric.kind == "scalar" else metric.kind
    rule = str(metric.rule or "") or ("bad if not a number" if metric.rule else "")
    return (metric.name, of, metric.unit, over, metric.level, metric.cost, metric.summary, rule)


def _print_table(found: list[tuple[str, Metric]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("group", *COLUMNS, box=None)
    for of, metric in found:
        table.add_row(metric.group, *map(escape, _row(of, metric)))
    wide = None if sys.stdout.isatty() else PIPED_WIDTH
    Console(width=wide).print(table)
