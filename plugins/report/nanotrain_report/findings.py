"""The section of what is wrong: a sentence for each metric that left its rule, with all the steps where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from nanotrain_report.blocks import Block, Group, Missing, Section, Sentence, Sentences
from nanotrain_report.clock import took
from nanotrain_report.families import families
from nanotrain_report.folder import RunFolder, Shown
from nanotrain_report.health import Judging, Stretch, stretches, told
from nanotrain_report.number_format import duration, plural

#: Sentences of a run that are shown, the worst first, and of those that monitors said.
MOST_SENTENCES, MOST_TOLD = 30, 200
#: Stretches of a sentence that are listed, the longest.
MOST_LISTED = 3
#: Groups from causes to what comes of them: the order of the table in docs/monitoring.md.
CAUSES = (
    "loss",
    "updates",
    "gradients",
    "optimizer",
    "attention",
    "residual stream",
    "data",
    "moe",
    "probes",
)


def health(shown: Sequence[Shown]) -> Section:
    """Return what metrics' rules and the monitors' texts say, with steps and times."""
    blocks: list[Block] = []
    for each in shown:
        rows = [*findings(each.run)]
        said = [
            Sentence("none", text, steps_of(each.run, first, last))
            for name, texts in each.run.history.texts.items()
            if "health" in name
            for first, last, text in told(texts)
        ]
        ruled = sum(family.metric.rule is not None for family in each.run.families)
        good = [Sentence("good", f"All {plural(ruled, 'metric')} with a rule stayed within it.")]
        inner: list[Block] = [Sentences(rows[:MOST_SENTENCES] or good)]
        if len(rows) > MOST_SENTENCES:
            inner.append(Missing(f"and {len(rows) - MOST_SENTENCES} more, less grave or shorter."))
        if said:
            title = f"What monitors said on the way: {plural(len(said), 'sentence')}"
            inner.append(Group(title, [Sentences(said[-MOST_TOLD:])], folded=True))
        blocks += inner if len(shown) == 1 else [Group(each.label, inner)]
    return Section("health", "Health", blocks)


def findings(run: RunFolder) -> Iterator[Sentence]:
    """Yield one sentence for each declaration and side, the worst first: of its worst stretch."""
    together: dict[tuple[str, str], list[Stretch]] = {}
    for family in run.families:
        for each in stretches(family, run.judging):
            together.setdefault((family.metric.name, each.side), []).append(each)
    for given_up in run.history.abandoned.values():
        judging = Judging(given_up, run.judging.patience)
        for family in families(given_up, run.declared):
            for each in stretches(family, judging):
                worded = attrs.evolve(
                    each, goes_on=False, sentence=f"In steps that were given up: {each.sentence}"
                )
                together.setdefault((family.metric.name, "given up"), []).append(worded)
    worst_first = sorted(together.values(), key=lambda found: min(map(_gravity, found)))
    for found in worst_first:
        worst = min(found, key=_gravity)
        listed = sorted(sorted(found, key=_gravity)[:MOST_LISTED], key=lambda each: each.first)
        when = [steps_of(run, s.first, s.last) + (", until now" if s.goes_on else "") for s in listed]
        if len(found) > MOST_LISTED:
            when.append(f"{len(found) - MOST_LISTED} more times")
        yield Sentence(worst.verdict, f"{worst.sentence.rstrip('.')}.", "; ".join(when))


def open_findings(run: RunFolder) -> list[Sentence]:
    """Return one sentence for each declaration and side that is not good now: bad ones, then causes first."""
    found: list[tuple[tuple[bool, int], Sentence]] = []
    for family in run.families:
        lasting = [each for each in stretches(family, run.judging) if each.goes_on]
        for side in ("low", "high"):
            of_side = [each for each in lasting if each.side == side]
            if not of_side:
                continue
            worst = min(of_side, key=_gravity)
            group = family.metric.group
            place = CAUSES.index(group) if group in CAUSES else len(CAUSES)
            steps = f"{steps_of(run, worst.first, worst.last)}, until now"
            said = Sentence(worst.verdict, f"{worst.sentence.rstrip('.')}.", steps)
            found.append(((worst.verdict != "bad", place), said))
    return [said for _, said in sorted(found, key=lambda each: each[0])]


def _gravity(found: Stretch) -> tuple[bool, bool, int]:
    return found.verdict != "bad", not found.goes_on, -found.count


def steps_of(run: RunFolder, first: int, last: int) -> str:
    """Return steps in words, with the time that they took."""
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    seconds = took(run, first, last)
    return f"{steps} ({duration(seconds)})" if seconds is not None and first != last else steps
