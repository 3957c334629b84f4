"""What finished runs reached, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from benchmarks.gap import unpaired
from benchmarks.learning.records import OURS, PEER, Finished
from benchmarks.report import table


def tables(runs: Sequence[Finished]) -> str:
    """Return, for each recipe, its runs, its curve, and the distance to nanoGPT's runs."""
    keys = dict.fromkeys((run.plan.recipe, run.plan.changes) for run in runs)
    return "\n\n".join(
        of_recipe([run for run in runs if (run.plan.recipe, run.plan.changes) == key]) for key in keys
    )


def of_recipe(runs: Sequence[Finished]) -> str:
    """Return the tables of one recipe."""
    first = runs[0]
    changes = "".join(f" --set {change}" for change in first.plan.changes)
    told = f"`{first.plan.recipe}{changes}`: {first.steps:,} steps, {first.tokens:,} tokens. {first.text}."
    machines = "; ".join(dict.fromkeys(run.machine for run in runs))
    about = "Training loss is the mean of each twentieth of a run, and both are means over seeds."
    return "\n\n".join([told, machines, table(*summary(runs)), *verdict(runs), about, table(*curve(runs))])


def summary(runs: Iterable[Finished]) -> tuple[Sequence[str], list[list[str]]]:
    """Return a row for each run."""
    header = ("by", "seed", "model", "held-out loss", "bits per byte", "tokens/s", "minutes")
    return header, [
        [
            run.plan.who,
            str(run.plan.seed),
            run.model,
            f"{run.held_out:.4f}",
            f"{run.bits_per_byte:.4f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.seconds / 60:.1f}",
        ]
        for run in sorted(runs, key=lambda run: (run.plan.who != OURS, run.plan.seed))
    ]


def verdict(runs: Sequence[Finished]) -> list[str]:
    """Return by how much our held-out loss is above nanoGPT's, and what chance alone may do."""
    ours = [run.held_out for run in runs if run.plan.who == OURS]
    theirs = [run.held_out for run in runs if run.plan.who == PEER]
    if min(len(ours), len(theirs)) < 2:
        return []
    gap, low, high = unpaired(ours, theirs)
    equal = "which contains 0: equal within the noise of seeds" if low <= 0 <= high else "which excludes 0"
    return [
        f"Held-out loss of {OURS} less {PEER}'s, means of {len(ours)} and {len(theirs)} seeds: {gap:+.4f}; "
        f"95% interval {low:+.4f} to {high:+.4f}, {equal}."
    ]


def curve(runs: Sequence[Finished]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the training loss of each side at the same steps, and our loss on held-out text."""
    by = {who: [run for run in runs if run.plan.who == who] for who in (OURS, PEER)}
    sides = [who for who, own in by.items() if own]
    points = min(len(run.training) for run in runs)
    header = ["up to step", *(f"{who}, training" for who in sides)]
    header += [f"{OURS}, held out"] * (OURS in sides)
    lines = []
    for point in range(points):
        step = runs[0].steps * (point + 1) // points
        cells = [f"{step:,}", *(f"{mean(run.training[point] for run in by[who]):.3f}" for who in sides)]
        if OURS in sides:
            held = [loss for run in by[OURS] for at, loss in run.validation if at == step]
            cells.append(f"{mean(held):.3f}" if held else "")
        lines.append(cells)
    return header, lines
