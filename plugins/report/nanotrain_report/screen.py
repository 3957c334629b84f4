"""What ``nanotrain top`` shows of a run: one screen of rich."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanotrain_report.about import lead, said_in, stamp
from nanotrain_report.clock import RECENT, gaps, pace
from nanotrain_report.families import Line
from nanotrain_report.findings import open_findings
from nanotrain_report.folder import RunFolder, Shown
from nanotrain_report.number_format import duration, number, plural, quantity, share
from nanotrain_report.parts import memory_of_ranks
from nanotrain_report.verdict import answers

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {"good": "green", "warn": "yellow", "bad": "red", "unknown": "dim", "none": "dim"}
SIGNS = {"good": "✓", "warn": "▲", "bad": "✕", "unknown": "?", "none": "·"}
#: Troubles that are listed, the worst.
MOST_OPEN = 5
#: Ranks of which each has a line: those that warned, then the fullest.
MOST_RANKS = 16


def screen(run: RunFolder, width: int) -> RenderableType:
    """Return the screen for a terminal of so many columns."""
    parts: list[RenderableType] = [Text(lead(Shown(run, run.name), alone=True), style="dim"), Text()]
    parts += [*progress(run, width), Text()]
    if run.lines:
        parts += [numbers(run, max(16, width - 42)), Text()]
    parts += [verdict(run), *ranks(run, width), Text(), *latest(run)]
    return Panel(Group(*parts), title=f"[bold]{escape(run.name)}[/]", border_style="dim", padding=(1, 2))


def verdict(run: RunFolder) -> Table:
    """Return the answers to the four questions."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for answer in answers(run):
        sign = (f"{SIGNS[answer.status]} ", STYLES[answer.status])
        said = Text.assemble(sign, (answer.headline, "bold"), (f"  {answer.detail}", "dim"))
        table.add_row(answer.question, said)
    return table


def escape(text: str) -> str:
    """Return text that rich takes as it is."""
    return text.replace("[", "\\[")


def progress(run: RunFolder, width: int) -> Iterator[RenderableType]:
    """Yield the bar, and what remains."""
    step, steps = run.step, run.steps
    if not steps:
        yield Text("no step has been logged yet", style="dim")
        return
    if run.unmeasured:
        yield Text('no metrics: its recipe has no [[monitor]] use = "jsonl"', style="yellow")
    bar = Table.grid()  # which ends its line, as a bar alone does not
    bar.add_row(ProgressBar(total=steps, completed=step, width=max(10, width - 8)))
    yield bar
    text = Text(f"step {step:,} of {steps:,}, {share(step / steps)}")
    left = eta(run)
    if run.state == "running" and left is not None:
        until = time.strftime("%H:%M", time.localtime(time.time() + left))
        text.append(f"; about {duration(left)} left, until {until}")
    quiet = silence(run)
    if run.state == "running" and quiet is not None and quiet > 3 * (pace(run) or math.inf) + 10:
        text.append(f"; nothing was logged for {duration(quiet)}", style="yellow")
    yield text


def eta(run: RunFolder) -> float | None:
    """Return the seconds that remain, by the time that logged steps took with everything between them."""
    times = run.history.times
    if len(times) < 2:
        return None
    seconds, resumed = gaps(run)
    trained = ~resumed[1 - RECENT :]  # the pause of a restart is not what a step takes
    steps = np.diff(times.steps[-RECENT:])[trained].sum()
    each = seconds[1 - RECENT :][trained].sum() / steps if steps else pace(run)
    return None if each is None else max(0.0, float((run.steps - run.history.step) * each))


def silence(run: RunFolder) -> float | None:
    """Return the seconds since the last logged step."""
    return time.time() - run.history.times.values[-1] if len(run.history.times) else None


def numbers(run: RunFolder, width: int) -> Table:
    """Return the newest values, each with its course."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    for name in ("loss", "validation/loss", "grad_norm", "lr", "tokens_per_second", "seconds"):
        line = run.line(name)
        if line is not None:
            value = "NaN" if not np.isfinite(line.values[-1]) else quantity(line.last, line_unit(name))
            table.add_row(name, value, sparkline(line, width))
    return table


def line_unit(name: str) -> str:
    """Return the unit that the column shows after the number."""
    return {"seconds": "s"}.get(name, "")


def sparkline(line: Line, width: int) -> str:
    """Return a curve as a row of blocks, the mean of each stretch of it; ``!`` where none is a number."""
    parts = np.array_split(line.values, min(width, len(line.values)))
    means = np.array(
        [part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts]
    )
    low, high = np.nanmin(means, initial=np.inf), np.nanmax(means, initial=-np.inf)
    reach = high - low if high > low else 1.0
    return "".join("!" if np.isnan(m) else BLOCKS[int((m - low) / reach * (len(BLOCKS) - 1))] for m in means)


def ranks(run: RunFolder, width: int) -> Iterator[RenderableType]:
    """Yield the memory of each rank, and the newest warning that it logged."""
    memory = memory_of_ranks(run)
    said = {
        entry["rank"]: entry
        for entry in run.log
        if isinstance(entry.get("rank"), int) and entry.get("level") in ("warning", "error")
    }
    count = run.history.start.get("world_size") or 0
    if memory is None and not said:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=8)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    held = {} if memory is None else {int(rank): most for rank, _, most in memory.ranks if rank.isdecimal()}
    if memory is not None and not held and memory.fullest.isdecimal():
        held = {int(memory.fullest): memory.peak}
    known = [rank for rank in {*said, *held} if 0 <= rank < count]
    worth = sorted(known, key=lambda rank: (rank not in said, -held.get(rank, 0.0)))
    for rank in sorted(worth[:MOST_RANKS]):
        peak, line = "", Text()
        if memory is not None and rank in held:
            peak = quantity(held[rank], memory.unit)
            line = Text("█" * round(20 * held[rank] / memory.peak), style="blue")
        entry = said.get(rank)
        word = Text(f"{entry['level']}: {said_in(entry)}" if entry else "", style="yellow")
        if peak or entry:
            table.add_row(f"rank {rank}", line, peak, word)
    yield Text()
    yield table
    if count > MOST_RANKS:
        yield Text(f"and {count - MOST_RANKS} more ranks", style="dim")


def latest(run: RunFolder) -> Iterator[RenderableType]:
    """Yield what is wrong now or else health's newest text, the newest checkpoint, the newest error, and how
    many lines cannot be read."""
    wrong_now = open_findings(run)
    for place, found in enumerate(wrong_now[:MOST_OPEN]):
        head = "health" if place == 0 else ""
        sign = (f"{SIGNS[found.status]} ", STYLES[found.status])
        yield Text.assemble((f"{head:12}", "dim"), sign, found.text)
    if len(wrong_now) > MOST_OPEN:
        yield Text(f"{'':12}and {len(wrong_now) - MOST_OPEN} more: see nanotrain report", style="dim")
    for name, texts in run.history.texts.items():
        if "health" in name and texts and not wrong_now:
            yield Text.assemble(("health      ", "dim"), texts[-1][1])
    saved = [row for row in run.history.events if row["event"] == "checkpoint"]
    if saved:
        age = duration(max(0.0, time.time() - float(saved[-1]["time"])))
        yield Text.assemble(
            ("checkpoint  ", "dim"), f"step {saved[-1]['step']:,}, {age} ago, {saved[-1]['path']}"
        )
    elif run.saved:  # a run without metrics
        _, newest = run.saved[-1]
        yield Text.assemble(("checkpoint  ", "dim"), f"step {newest.step:,}, {newest.path}")
    else:
        yield Text.assemble(("checkpoint  ", "dim"), "none yet")
    if run.history.continuations:
        continuation = run.history.continuations[-1]
        lost = sum(each.came_to - each.step for each in run.history.continuations)
        last = f"the last after step {continuation.step:,} ({continuation.reason})"
        text = f"{len(run.history.continuations)}; {last}; {number(lost)} steps lost in all"
        yield Text.assemble(("restarts    ", "dim"), text)
    wrong = [entry for entry in run.log if entry.get("level") in ("error", "critical")]
    if wrong:
        ago = duration(time.time() - stamp(wrong[-1]))
        yield Text.assemble(("last error  ", "dim"), (said_in(wrong[-1]), "red"), (f", {ago} ago", "dim"))
    if run.unread:
        yield Text(f"{'left out':12}{plural(run.unread, 'line')} of metrics.jsonl that cannot be read")
