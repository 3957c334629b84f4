"""Sections for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from nanotrain_plan.rendering.parts import Picture, Section, Statement, Table

#: Rows of a table on a terminal; a pipe, ``--json`` and ``--html`` have all.
MOST_ROWS = 30


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
            console.print(Padding(render(each, MOST_ROWS if console.is_terminal else None), (0, 0, 0, 2)))
    console.print()


def render(each: Statement | Table | Picture, most: int | None) -> RenderableType:
    """Return what a terminal shows of a part, of a table at most so many rows; None: all."""
    if isinstance(each, Statement):
        told = Text(each.text)
        for source in each.sources:  # a link in terminals that know links
            told.append(f"  [{source.label}]", style=Style(dim=True, link=source.link))
        return told
    if isinstance(each, Picture):
        return Text("\n".join(each.lines), style="dim", no_wrap=True, overflow="ellipsis")
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="dim")
    for number, column in enumerate(each.columns):
        table.add_column(column, justify="right" if each.is_number(number) else "left", overflow="fold")
    rows = list(each.cells())
    for row in rows[:most]:
        table.add_row(*map(Text, row))
    if most is not None and len(rows) > most:
        table.add_row(f"... and {len(rows) - most} more: --html and --json have them")
    return table
