"""Sentences with their numbers and sources, tables, pictures.

A sentence is a template without digits, filled with values: so whatever number a reader sees was read from an
object, and ``--json`` has it as a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nanotrain_plan.dry.origin import Origin
from nanotrain_plan.number_format import count, duration, size

#: Most ranks that a sentence lists one by one.
LISTED = 8


class Bytes(int):
    """Shown in decimal units, and exact in JSON."""

    def __format__(self, spec: str) -> str:
        return size(int(self))

    __str__ = __repr__ = int.__repr__


class FLOPs(int):
    """Shown with three or four digits, and exact in JSON.

    >>> f"{FLOPs(250_449_887_232)}, {FLOPs(12)}"
    '250.4 GFLOP, 12 FLOP'
    """

    def __format__(self, spec: str) -> str:
        number, _, unit = count(int(self)).partition(" ")
        return f"{number} {unit.replace('B', 'G')}FLOP"


class Seconds(float):
    """Shown with three digits and a unit, and exact in JSON."""

    def __format__(self, spec: str) -> str:
        return duration(float(self))


class Share(float):
    """Shown in percent."""

    def __format__(self, spec: str) -> str:
        return f"{float(self):.1%}"


class Ranks(tuple[int, ...]):
    """Shown as ``0, 1, 4``; of many the first two, the last and how many.

    >>> f"{Ranks((0, 2))} and {Ranks(range(0, 64, 4))}"
    '0, 2 and 0, 4, ... 60 (16)'
    """

    def __format__(self, spec: str) -> str:
        if len(self) <= LISTED:
            return ", ".join(map(str, self))
        return f"{self[0]}, {self[1]}, ... {self[-1]} ({len(self)})"


class Shape(tuple[int, ...]):
    """Shown as ``[256, 128]``."""

    def __format__(self, spec: str) -> str:
        return f"[{', '.join(map(str, self))}]"


@attrs.define(frozen=True)
class Source:
    """The file and line that does what a sentence says."""

    file: str
    line: int
    name: str

    @classmethod
    def of(cls, origin: Origin) -> Source:
        """Return that of a place in the code."""
        return cls(origin.file, origin.line, origin.name)

    @property
    def link(self) -> str:
        """A ``file:`` URL."""
        return Path(self.file).absolute().as_uri()

    @property
    def label(self) -> str:
        """``nanotrain_tp/collectives.py:120``: from the package on."""
        parts = Path(self.file).parts
        first = next((n for n, part in enumerate(parts) if part.startswith("nanotrain_")), len(parts) - 1)
        for n in range(first + 1, len(parts) - 1):  # a checkout may have the name of a package
            if parts[n].startswith("nanotrain_"):
                first = n
        return f"{'/'.join(parts[first:])}:{self.line}"


@attrs.define(frozen=True)
class Statement:
    """A sentence."""

    template: str
    values: Mapping[str, Any]
    sources: Sequence[Source] = ()

    @property
    def text(self) -> str:
        """The sentence as it is read."""
        return self.template.format_map(self.values)


def say(template: str, *origins: Origin | None, **values: Any) -> Statement:
    """Return a sentence: its numbers are values, which format themselves, plain ones with ``{n:,}``."""
    bare = re.sub(r"\{[^}]*\}", "", template)
    assert not re.search(r"\d", bare), f"a number that is no value: {template}"
    found = dict.fromkeys(Source.of(origin) for origin in origins if origin is not None)
    return Statement(template, values, tuple(found))


@attrs.define(frozen=True)
class Table:
    """Rows of values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def is_number(self, column: int) -> bool:
        """Return whether a column has numbers, which stand at its right."""
        return any(isinstance(row[column], int | float) for row in self.rows)

    def cells(self) -> Iterable[list[str]]:
        """Yield each row as it is read."""
        for row in self.rows:
            yield [_cell(value) for value in row]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and type(value) is int:
        return f"{value:,}"
    return f"{value}" if type(value) in (str, float) else format(value)


@attrs.define(frozen=True)
class Picture:
    """A drawing for a page, as SVG, and for a terminal, as lines of text."""

    title: str
    svg: str
    lines: Sequence[str] = ()


#: What a function yields that tells something.
Body = Iterator[Statement | Table | Picture]


@attrs.define(frozen=True)
class Section:
    """What stands under one heading."""

    title: str
    body: Sequence[Statement | Table | Picture]


def to_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return sections as JSON: of each sentence its text, its numbers and where it comes from."""
    return [
        {
            "title": section.title,
            "statements": [
                {
                    "text": each.text,
                    "values": dict(each.values),
                    "sources": [{**attrs.asdict(s), "label": s.label} for s in each.sources],
                }
                for each in section.body
                if isinstance(each, Statement)
            ],
            "tables": [
                {"columns": list(each.columns), "rows": [list(row) for row in each.rows]}
                for each in section.body
                if isinstance(each, Table)
            ],
        }
        for section in sections
    ]
