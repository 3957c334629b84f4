"""``nanotrain metrics``: the metrics of the core and the installed monitors, and their good values."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from nanotrain_core.cli.common import PIPED_WIDTH, add_plugin_options, plugin_arguments, tell_broken
from nanotrain_core.errors import Exit, NanotrainError, did_you_mean
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import OVER, Metric, may_name
from nanotrain_core.registry.registry import Registry, load_plugins

#: Column width of sentences, which are wrapped, and its minimum.
TEXTS, READABLE = ("what it is", "rule"), 30

#: Columns that a narrow terminal omits, in this order.
DROPPED = ("cost", "level", "over ranks", "rule", "of", "group")

COLUMNS = ("metric", "of", "unit", "over ranks", "level", "cost", "what it is", "rule")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="only these: a name or pattern such as 'loss*', or a group such as 'gradients'",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table for each group")
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the declarations."""
    asked = plugin_arguments(args)
    registry = load_plugins(block=asked.blocked, local=asked.local)
    tell_broken(registry)
    found = by_group(registry)
    if args.pattern is not None:
        found = chosen(found, args.pattern)
    if args.json:
        print(json.dumps([{"of": of, **attrs.asdict(metric)} for of, metric in found], indent=2))
    elif args.markdown:
        print(markdown(found))
    else:
        _print_table(found)
    return Exit.USER if registry.broken else Exit.DONE


def chosen(found: list[tuple[str, Metric]], pattern: str) -> list[tuple[str, Metric]]:
    """Return the metrics of that group, and those that the pattern can match.

    Raises:
        NanotrainError: there are none; the nearest is suggested.
    """
    fit = [each for each in found if pattern == each[1].group or may_name(pattern, each[1].name)]
    if not fit:
        known = [word for _, metric in found for word in (metric.group, metric.name)]
        near = did_you_mean(pattern, list(dict.fromkeys(known)))
        raise NanotrainError(f"no metric or group named '{pattern}'{near}; `nanotrain metrics` lists them")
    return fit


def by_group(registry: Registry) -> list[tuple[str, Metric]]:
    """Return all metrics, each after its publisher: ``core``, or the name of a monitor."""
    found = [("core", metric) for metric in CORE]
    for use in registry.names("monitor"):
        found += [(use, metric) for metric in registry.get("monitor", use).metrics]
    return sorted(found, key=lambda each: each[1].group)


def markdown(found: list[tuple[str, Metric]]) -> str:
    """Return tables with a heading for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(metric.group for _, metric in found):
        lines += [f"### {group}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        mine = _rows([(of, metric) for of, metric in found if metric.group == group])
        lines += [f"| `{first}` | {' | '.join(rest)} |" for first, *rest in mine] + [""]
    return "\n".join(lines).strip()


def _rows(found: list[tuple[str, Metric]]) -> list[tuple[str, ...]]:
    """Return a row for each metric, and one for all statistics of a per-rank value."""
    names = {metric.name for _, metric in found}
    rows = []
    for of, metric in found:
        stem, _, over = metric.name.rpartition("/")
        each_rank = over in OVER and all(f"{stem}/{other}" in names for other in OVER)
        if not each_rank:
            rows.append(_row(of, metric))
        elif over == OVER[0]:
            name, summary = f"{stem}/{{{','.join(OVER)}}}", metric.summary.partition(";")[0]
            _, _, unit, _, *rest = _row(of, attrs.evolve(metric, summary=summary))
            rows.append((name, of, unit, "each rank", *rest))
    return rows


def _row(of: str, metric: Metric) -> tuple[str, ...]:
    over = metric.reduce if metric.kind == "scalar" else metric.kind
    rule = str(metric.rule or "") or ("bad if not a number" if metric.rule else "")
    cost = metric.cost if metric.every == 1 else f"{metric.cost}, every {metric.every}"
    return (metric.name, of, metric.unit, over, metric.level, cost, metric.summary, rule)


def _print_table(found: list[tuple[str, Metric]]) -> None:
    """Print the columns that fit the terminal; a metric's name and unit are never truncated."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    names = ("group", *COLUMNS)
    rows = [
        (group, *row)
        for group in dict.fromkeys(metric.group for _, metric in found)
        for row in _rows([each for each in found if each[1].group == group])
    ]
    wide = Console().width if sys.stdout.isatty() else PIPED_WIDTH
    longest = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    need = {
        name: (min(size, READABLE) if name in TEXTS else size) + 2
        for name, size in zip(names, longest, strict=True)
    }
    left_out: list[str] = []
    while sum(need.values()) > wide and len(left_out) < len(DROPPED):
        left_out.append(DROPPED[len(left_out)])
        del need[left_out[-1]]
    table = Table(box=None)
    for name in need:
        table.add_column(name, no_wrap=name not in TEXTS)
    for row in rows:
        table.add_row(*(escape(cell) for name, cell in zip(names, row, strict=True) if name in need))
    Console(width=max(wide, sum(need.values()))).print(table)
    if left_out:
        note = f"{', '.join(left_out)} left out: a wider terminal, a pipe or --json has them"
        print(f"nanotrain: note: {note}", file=sys.stderr)
