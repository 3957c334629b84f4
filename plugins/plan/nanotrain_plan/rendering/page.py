"""Sections as one HTML page without scripts, which fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nanotrain_plan.rendering.parts import Picture, Section, Source, Statement, Table

STYLE = """
:root { --ink: #1d2129; --paper: #fff; --dim: #667; --line: #d5d8de; --on: #fff; --bar: #4c78a8;
 --c0: #4c78a8; --c1: #d9730d; --c2: #448a3c; --c3: #a0579b; --c4: #b8483f; --c5: #3f8f8a }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe3ea; --paper: #15181d; --dim: #99a; --line: #3a404a;
 --c0: #5b8cc4; --c1: #e08a35; --c2: #5aa351; --c3: #b673b1; --c4: #cc6259; --c5: #56a6a1 } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 940px; padding: 0 1rem;
 color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem; font-weight: 600 } h2 { font-size: 1.15rem; font-weight: 600; margin-top: 2.2rem }
nav a, a { color: var(--c0) } nav { font-size: .9rem } p { margin: .45rem 0 }
cite { font: 12px ui-monospace, monospace; color: var(--dim); margin-left: .4em; overflow-wrap: anywhere }
figure { margin: 1rem 0 } figcaption { font-size: .85rem; color: var(--dim) }
table { border-collapse: collapse; font-size: .85rem; margin: .8rem 0 } .wide { overflow-x: auto }
th { text-align: left; color: var(--dim); font-weight: 500 } td, th { padding: .15rem .7rem .15rem 0;
 border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap } svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg .on { fill: var(--on) } svg .small { font-size: 11px } .cell { stroke: var(--paper) }
.whole { fill: none; stroke: var(--dim); stroke-dasharray: 3 } .link { stroke: var(--dim) }
""" + "".join(f".c{n} {{ fill: var(--c{n}) }} " for n in range(6))


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page."""
    links = " · ".join(f'<a href="#s{n}">{escape(s.title)}</a>' for n, s in enumerate(sections))
    body = "".join(_section(number, section) for number, section in enumerate(sections))
    policy = (
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    )
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"{policy}<meta name=color-scheme content='light dark'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return (
        f"<!doctype html><html lang=en><head>{head}</head><body><h1>{escape(title)}</h1>"
        f"<nav>{links}</nav>{body}</body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    parts = "".join(part for each in section.body for part in _part(each))
    return f"<h2 id=s{number}>{escape(section.title)}</h2>{parts}"


def _part(each: Statement | Table | Picture) -> Iterator[str]:
    if isinstance(each, Statement):
        yield f"<p>{escape(each.text)}{''.join(map(_source, each.sources))}</p>"
    elif isinstance(each, Picture):
        yield f"<figure>{each.svg}<figcaption>{escape(each.title)}.</figcaption></figure>"
    else:
        yield table(each)


def table(each: Table) -> str:
    """Return rows of values, numbers at the right; ``wide``, ``n`` are for the page's style."""
    heads = "".join(_cell("th", n, column, each) for n, column in enumerate(each.columns))
    rows = "".join(
        f"<tr>{''.join(_cell('td', n, cell, each) for n, cell in enumerate(row))}</tr>"
        for row in each.cells()
    )
    return f"<div class=wide><table><tr>{heads}</tr>{rows}</table></div>"


def _cell(tag: str, number: int, words: str, table: Table) -> str:
    kind = " class=n" if table.is_number(number) else ""
    return f"<{tag}{kind}>{escape(words)}</{tag}>"


def _source(source: Source) -> str:
    link = f'<a href="{escape(source.link)}">{escape(source.label)}</a>'
    return f'<cite title="{escape(source.file)}: {escape(source.name)}">{link}</cite>'
