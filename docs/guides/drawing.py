"""What the guides' pictures are drawn with: SVG that grows with the page and reads on light and dark.

A guide is a script ``docs/guides/NAME.py`` beside its page. ``python docs/guides/NAME.py`` prints the page's
numbers, ``--draw`` writes its pictures anew, from the same computation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.on{fill:#fff}.whole{fill:none;stroke:#888}"
    ".c0{fill:#3566a8}.c1{fill:#c2642d}.c2{fill:#3f8a52}.c3{fill:#7d5aa6}.c4{fill:#8a8a8a}"
    ".line{stroke-width:2;fill:none}.s0{stroke:#3566a8}.s1{stroke:#c2642d}.s2{stroke:#3f8a52}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.on{fill:#fff}}"
)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """Return words at a place in pixels."""
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{chosen}>{escape(words)}</text>'


def rect(x: float, y: float, wide: float, high: float, kind: str, strength: float = 1.0) -> str:
    """Return a rectangle; ``strength`` from 0 to 1 is how opaque it is."""
    opaque = "" if strength == 1.0 else f' fill-opacity="{strength:.2f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" class="{kind}"{opaque}/>'


def line(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Return a line through points."""
    return f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in points)}" class="line {kind}"/>'


def svg(wide: int, high: int, parts: Iterable[str], title: str) -> str:
    """Return the whole picture."""
    box = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def guide(main: Callable[[], None], pictures: Callable[[], dict[str, str]]) -> None:
    """Print a guide's numbers, or with ``--draw`` write its pictures: name -> SVG."""
    if sys.argv[1:] != ["--draw"]:
        main()
        return
    for name, picture in pictures().items():
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
