"""A simulated run, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanotrain_plan.goodput import Goodput
from nanotrain_plan.number_format import duration
from nanotrain_plan.plan import Plan
from nanotrain_plan.rendering.terminal import new_table, print_indented
from nanotrain_plan.simulation import Simulated


def show_simulation(found: Simulated, plan: Plan, console: Console) -> None:
    """Print how long steps take with slow ranks, and what failures leave of the time."""
    slow, steps, failures = found.wanted.stragglers, found.steps, found.failures
    console.print(
        Text(
            f"Simulated, {plan.ranks:,} rank{'s' if plan.ranks > 1 else ''}, seed {found.wanted.seed}",
            style="bold",
        )
    )
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("step", style="dim"),
        f"{duration(steps.ideal)} if no rank is slow; of {found.wanted.steps:,} drawn, {slow.share:.2%} of "
        f"ranks {slow.factor:g} times as slow: mean {duration(steps.mean)}, p50 {duration(steps.p50)}, "
        f"p95 {duration(steps.p95)}, p99 {duration(steps.p99)}",
    )
    table.add_row(
        Text("failures", style="dim"),
        f"one in {duration(failures.mean)}; training waits {duration(failures.checkpoint)} for a checkpoint, "
        f"{duration(failures.restart)} for a restart",
    )
    print_indented(table, console)
    columns = ("checkpoints", "every", "goodput, simulated", "expected (Daly)")
    goodputs = new_table(columns, [False, True, True, True])
    rows: list[tuple[str, Goodput | None]] = [
        ("as asked for" if found.wanted.checkpoint_minutes else "as the recipe has them", found.own),
        ("best of the simulation", found.best),
        ("Young 1974", found.young),
        ("Daly 2006", found.daly),
    ]
    for name, each in rows:
        if each is not None:
            goodputs.add_row(name, duration(each.interval), f"{each.simulated:.2%}", f"{each.expected:.2%}")
    print_indented(goodputs, console)
