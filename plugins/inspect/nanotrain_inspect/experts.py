"""Experts of saved weights: their norms, and the share of tokens that each got in the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import is_run, natural_sort_key, read_metrics

if TYPE_CHECKING:
    from nanotrain_inspect.statistics import Statistics

#: Histograms of the monitor ``moe``: tokens of each expert, by router.
LOADS = "moe/load/"


@attrs.define(frozen=True)
class Load:
    """Which experts the tokens of a step went to."""

    step: int
    shares: tuple[float, ...]
    """Fraction of the tokens' choices that each expert [E] got."""


def norms_of(found: Sequence[Statistics]) -> dict[str, dict[int, float]]:
    """Return the norm of each expert's weights by ``layers.1.moe.experts``, stacked in one or one by one."""
    squares: dict[str, dict[int, float]] = {}
    for each in found:
        part = re.match(r"(.*\.experts)\.(?:(\d+)\.)?", each.name)
        if not part or len(each.shape) < 2:
            continue
        alone = {int(part[2]): each.rms**2 * each.count} if part[2] else {}
        sums = squares.setdefault(part[1], {})
        for expert, square in (alone or dict(enumerate(each.expert_squares))).items():
            sums[expert] = sums.get(expert, 0.0) + square
    return {
        name: {expert: part**0.5 for expert, part in sums.items()} for name, sums in squares.items() if sums
    }


def loads_of(folder: Path) -> dict[str, Load]:
    """Return the newest load of each router that a run's metrics have; empty if ``folder`` is not a run's."""
    if not folder.is_dir() or not is_run(folder):
        return {}
    loads = {}
    rows = read_metrics(folder, [f"{LOADS}*"], abandoned=False).histograms
    for name in sorted(rows, key=natural_sort_key):
        step, load = rows[name][-1]
        if sum(load.counts):
            shares = tuple(count / sum(load.counts) for count in load.counts)
            loads[name.removeprefix(LOADS)] = Load(step, shares)
    return loads


def norms_told(norms: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Yield lines: an expert that is never chosen keeps its first weights, and shrinks by weight decay."""
    if norms:
        yield "\nexperts: norm of the smallest and of the largest, of each layer"
    for name, of_expert in norms.items():
        least, most = min(of_expert, key=of_expert.__getitem__), max(of_expert, key=of_expert.__getitem__)
        ends = f"{of_expert[least]:.4g} (expert {least}) to {of_expert[most]:.4g} (expert {most})"
        yield f"  {name}: {len(of_expert)} experts, {ends}"


def loads_told(loads: Mapping[str, Load]) -> Iterator[str]:
    """Yield lines: what share of the tokens the experts of each layer got."""
    if loads:
        yield "\nexperts: share of tokens of the least and of the most used, of each layer"
    for name, load in loads.items():
        shares = load.shares
        least, most = min(shares), max(shares)
        ends = f"{least:.2%} (expert {shares.index(least)}) to {most:.2%} (expert {shares.index(most)})"
        even, unused = f"{1 / len(shares):.2%} each is even", sum(share == 0.0 for share in shares)
        none = f"; {unused} got none" if unused else ""
        yield f"  {name}: {len(shares)} experts at step {load.step:,}, {ends}; {even}{none}"
