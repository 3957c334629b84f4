"""Building blocks of a report's sections. The page's template defines the appearance of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    from bokeh.plotting import figure

Status = Literal["good", "warn", "bad", "unknown", "none"]


@attrs.define(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    text: str


@attrs.define(frozen=True)
class Missing:
    """The reason why data are missing here, and how to record them."""

    kind: ClassVar = "missing"
    text: str


@attrs.define(frozen=True)
class Sentence:
    """A finding, with its weight and when it was so."""

    status: Status
    text: str
    when: str = ""


@attrs.define(frozen=True)
class Sentences:
    """Findings, the worst first."""

    kind: ClassVar = "sentences"
    rows: Sequence[Sentence]


@attrs.define(frozen=True)
class Table:
    """Rows under headings."""

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    """Columns that are numbers: set to the right."""
    caption: str = ""


@attrs.define(frozen=True)
class Facts:
    """Names and values."""

    kind: ClassVar = "facts"
    rows: Sequence[tuple[str, str]]


@attrs.define(frozen=True)
class Pre:
    """Text as it is, folded away if ``summary`` says what it is."""

    kind: ClassVar = "pre"
    text: str
    summary: str = ""
    title: str = ""


@attrs.define(frozen=True)
class Key:
    """A color and what it stands for."""

    label: str
    color: str
    line: bool = True


@attrs.define(frozen=True, eq=False)
class Chart:
    """A figure with its title, its legend, and what it shows in words."""

    kind: ClassVar = "chart"
    title: str
    figure: figure
    note: str = ""
    keys: Sequence[Key] = ()
    ramp: tuple[str, str, str] | None = None
    """Of a heat map: the first value, a CSS gradient, the last value."""
    words: str = ""
    """The same for who cannot see it: ``loss: 120 values, from 5.6 to 2.1``."""
    wide: bool = False
    names: Sequence[str] = ()
    """The metrics that it shows."""

    @property
    def height(self) -> int:
        """Of the figure in pixels: its place is kept free until it is drawn."""
        return int(self.figure.height or 230)

    def item(self) -> str:
        """Return the figure as bokeh's JSON, safe between ``<script>`` tags."""
        from bokeh.embed import json_item

        item: dict[str, Any] = json_item(self.figure)
        return json.dumps(item, separators=(",", ":")).replace("<", "\\u003c")


@attrs.define(frozen=True)
class Group:
    """Blocks under a heading of their own; ``folded``: opened by a click."""

    kind: ClassVar = "group"
    title: str
    blocks: Sequence[Any]
    folded: bool = False


Block = Text | Missing | Sentences | Table | Facts | Pre | Chart | Group


@attrs.define(frozen=True)
class Section:
    """A part of the report with a place in its contents."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    short: str = ""
    """What the contents call it, if its title is long."""
