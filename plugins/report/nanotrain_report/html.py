"""Puts runs together into one HTML page that needs nothing else: script, style and data are in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nanotrain_report import about
from nanotrain_report.blocks import Chart, Section
from nanotrain_report.charts import COLORS
from nanotrain_report.findings import health, open_findings
from nanotrain_report.folder import RunFolder, Shown
from nanotrain_report.number_format import moment, plural
from nanotrain_report.sections import Sections
from nanotrain_report.verdict import answers

SIGNS = {"good": "✓", "warn": "▲", "bad": "✕", "unknown": "?", "none": "·"}
SAYS = {"good": "good", "warn": "look at this", "bad": "bad", "unknown": "not known", "none": "note"}

#: Most current findings that the first screen shows.
MOST_NOW = 2


def page(runs: Sequence[RunFolder], *, live: bool = False, verify: bool = False) -> str:
    """Return the report of runs.

    Args:
        runs: one, or several to compare: then curves lie over each other.
        live: whether the page asks its server for news, and for nothing else.
        verify: whether checkpoints are read from end to end.
    """
    shown = [
        Shown(run, label, COLORS[n % len(COLORS)])
        for n, (run, label) in enumerate(zip(runs, labels(runs), strict=True))
    ]
    items, folders = list[str](), [str(run.path) for run in runs]

    def add(chart: Chart) -> int:
        items.append(chart.item())
        return len(items) - 1

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_text("page.html.jinja"))
    told = [{"label": each.label, "color": each.color, **first_screen(each.run)} for each in shown]
    # The template draws charts in order and calls `add` on the way; their data follows the text.
    given: dict[str, Any] = {
        "title": " and ".join(each.label for each in shown) if len(shown) < 4 else plural(len(shown), "run"),
        "leads": [about.lead(each, alone=len(shown) == 1) for each in shown],
        "sections": sections(shown, verify=verify),
        "answers": told,
        "signs": SIGNS,
        "says": SAYS,
        "add": add,
        "items": items,
        "live": live,
        "connect": "'self'" if live else "'none'",
        "css": _text("page.css"),
        "js": _text("page.js"),
        "bokeh": bokeh_script(),
        "foot": f"Written {moment(time.time())} by nanotrain report from {', '.join(folders)}.",
    }
    return template.render(given)


def first_screen(run: RunFolder) -> dict[str, Any]:
    """Return the answers to the four questions, and current findings that no answer mentions."""
    found = answers(run)
    details = " ".join(answer.detail for answer in found)
    now = [each for each in open_findings(run) if each.text not in details]
    return {"answers": found, "now": now[:MOST_NOW]}


def sections(shown: Sequence[Shown], *, verify: bool) -> list[Section]:
    """Return all sections in the order of the page."""
    drawn = Sections(shown)
    found = [
        drawn.learning(),
        health(shown),
        drawn.continuity(),
        drawn.time(),
        drawn.memory(),
        drawn.pipeline(),
        drawn.experts(),
        drawn.layers(),
        drawn.checkpoints(verify=verify),
        about.samples(shown),
        drawn.other(),
        about.what_it_is(shown),
        about.recipe(shown),
    ]
    return [section for section in found if section is not None]


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """Return what runs are called: their names, or their folders' where names are equal."""
    names = [run.name for run in runs]
    if len({*names}) == len(names):
        return names
    folders = [run.path.resolve().name for run in runs]
    return folders if len({*folders}) == len(folders) else [str(run.path) for run in runs]


def _text(name: str) -> str:
    return (files("nanotrain_report") / "page" / name).read_text(encoding="utf-8")


@cache
def bokeh_script() -> Markup:
    """Return bokeh's own script: curves and heat maps, without its widgets and tables."""
    raw = Resources(mode="inline", components=["bokeh"], minified=True).js_raw
    return Markup("\n".join(raw).replace("</script", "<\\/script"))
