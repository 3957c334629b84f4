"""Sections for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from nanotrain_plan.rendering.parts import Picture, Section, Statement, Table

#: Rows of a table on a terminal; a pipe, ``--json`` and ``--html`` have all.
MOST_ROWS = 30

#: To so many columns of a terminal names in a table are wrapped, where it is too wide.
NARROW_NAME = 10

#: Columns left of what stands under a heading.
INDENT = 2


def plain_console(width: int) -> Console:
    """Return a console for stdout that prints words as they are: ``[[parallel]]`` is no markup.

    Args:
        width: in columns, where stdout is no terminal.
    """
    wide = None if sys.stdout.isatty() else width
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def show(title: str, sections: Sequence[Section], console: Console) -> None:
    """Print sections under a title."""
    console.print()
    console.print(Text(title, style="bold"))
    for section in sections:
        console.print()
        console.print(Text(section.title, style="bold"))
        for each in section.body:
            print_indented(render(each, MOST_ROWS if console.is_terminal else None), console)
    console.print()


def print_indented(part: RenderableType, console: Console) -> None:
    """Print what stands under a heading.

    A table that needs more columns than the terminal has is set closer, and if that is not enough printed as
    wide as it is: the terminal wraps its lines, where rich would cut numbers.
    """
    for each in part.renderables if isinstance(part, Group) else [part]:
        width = console.width
        if isinstance(each, RichTable) and each.box and INDENT + narrowest(each) > width:
            each.padding = (0, 1, 0, 0)
            console.width = max(width, INDENT + narrowest(each))
        console.print(Padding(each, (0, 0, 0, INDENT)))
        console.width = width


def new_table(columns: Sequence[str], numbers: Sequence[bool]) -> RichTable:
    """Return a table without rows.

    Args:
        columns: their headings.
        numbers: of each column, whether it stands at the right and is never wrapped, as names are.
    """
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="dim")
    for column, number in zip(columns, numbers, strict=True):
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def grid(rows: Iterable[tuple[str, str]]) -> RichTable:
    """Return lines of a name and what is said of it."""
    table = RichTable.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, told in rows:
        table.add_row(Text(name, style="dim"), told)
    return table


def narrowest(table: RichTable) -> int:
    """Return how many columns of a terminal a :func:`new_table` needs, its names wrapped."""
    wide = 0
    for column in table.columns:
        longest = max(cell_len(str(each)) for each in (column.header, *column.cells))
        wide += longest if column.no_wrap else min(longest, NARROW_NAME)
    _, right, _, left = table.padding
    return 2 + wide + (len(table.columns) - 1) * (left + 1 + right)


def render(each: Statement | Table | Picture, most: int | None) -> RenderableType:
    """Return what a terminal shows of a part, of a table at most so many rows; None: all."""
    if isinstance(each, Statement):
        told = Text(each.text)
        for source in each.sources:  # a link in terminals that know links
            told.append(f"  [{source.label}]", style=Style(dim=True, link=source.link))
        return told
    if isinstance(each, Picture):
        return Text("\n".join(each.lines), style="dim", no_wrap=True, overflow="ellipsis")
    table = new_table(each.columns, [each.is_number(number) for number in range(len(each.columns))])
    rows = list(each.cells())
    for row in rows[:most]:
        table.add_row(*map(Text, row))
    if most is not None and len(rows) > most:
        return Group(table, Text(f"... and {len(rows) - most} more: --html and --json have them"))
    return table
