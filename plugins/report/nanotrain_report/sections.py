"""Sections of figures, each from the metrics of its groups, whatever these are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nanotrain_report.about import checkpoints, continuity, memory_rows
from nanotrain_report.blocks import Block, Chart, Group, Key, Missing, Section, Table, Text
from nanotrain_report.charts import COLORS, curves, stack
from nanotrain_report.drawing import family_charts, in_words, line_of, marks_of
from nanotrain_report.experts import load_charts
from nanotrain_report.families import Family, Line
from nanotrain_report.folder import Shown
from nanotrain_report.number_format import quantity, share
from nanotrain_report.parts import RankMemory, memory_of_ranks, rank_histograms, shares_of_time, step_parts
from nanotrain_report.pipeline import timeline_of
from nanotrain_report.pointer import Series
from nanotrain_report.sources import bring
from nanotrain_report.verdict import NO_METRICS

#: Section -> its title and the groups of metrics that it shows, in order.
GROUPS = {
    "learning": ("Loss and optimization", ("loss", "gradients", "optimizer", "data")),
    "time": ("Where a step's time goes", ("time", "speed")),
    "memory": ("Memory", ("memory", "device")),
    "pipeline": ("Pipeline", ("pipeline",)),
    "experts": ("Experts", ("moe",)),
    "layers": (
        "Layer by layer",
        ("gradients", "updates", "weights", "attention", "residual", "residual stream", "activations"),
    ),
}
#: Those that open a section, first; what a section draws itself is not drawn again.
FIRST = ("loss", "validation/loss", "grad_norm", "lr")
#: Numbers that only count: a straight line says nothing.
COUNTERS = frozenset({"tokens"})
#: Ranks whose memory is listed.
MOST_RANKS = 32
#: More charts of a section than these are folded away.
MOST_OPEN = 6
#: Curves of a declaration that a sentence can tell of.
FEW = 4


def of_layers(family: Family) -> bool:
    """Return whether a family tells something of each layer, block or parameter."""
    return (
        bool({"parameter", "block", "layer", "module", "name"} & {*family.placeholders})
        and len(family.lines) > 1
    )


class Sections:
    """Draws sections in turn, and knows which metrics have been drawn."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        self.shown, self.drawn = shown, set[str]()

    def learning(self) -> Section:
        """Return loss with validation, gradient norm, learning rate, and the rest of their groups."""
        blocks: list[Block] = [self._loss()] if self._any("loss") else []
        blocks += [*self._named("grad_norm"), *self._named("lr")]
        self.drawn |= {"loss", "validation/loss"}
        blocks += self._rest("learning", lambda family: not of_layers(family))
        if not blocks:
            unmeasured = all(each.run.unmeasured and each.run.step for each in self.shown)
            blocks = [Missing(NO_METRICS if unmeasured else "No step has been logged yet.")]
        return Section("learning", GROUPS["learning"][0], blocks, "Loss")

    def _loss(self) -> Chart:
        alone = len(self.shown) == 1
        series: list[Series] = []
        words, keys = [], []
        for each in self.shown:
            loss, held = each.run.line("loss"), each.run.line("validation/loss")
            if loss is not None:
                series += line_of(each, loss, alone=alone)
                words.append(in_words(loss, "nats"))
                keys.append(Key("training loss" if alone else each.label, each.color))
            if held is not None:
                color = COLORS[1] if alone else each.color
                label = "validation loss" if alone else f"{each.label}, validation"
                series.append(Series(label, held.steps, held.values, color, dots=True))
                words.append(in_words(held, "nats"))
                keys += [Key(label, color, line=False)] if alone else []
        terms = [line for name, line in self.shown[0].run.lines.items() if name.startswith("losses/")]
        compared = terms[0] if alone and len(terms) > 1 else None
        if compared is not None:  # validation is of one term alone
            series.insert(0, Series(compared.name, compared.steps, compared.values, COLORS[2], 1.4))
            keys.insert(1, Key(f"{compared.label} alone", COLORS[2]))
        marks = [mark for each in self.shown for mark in marks_of(each, alone=alone)]
        dots = "" if alone else " Dots are validation."
        dashed = " A dashed line: the run went on from there; faint is what it gave up." if marks else ""
        drawn = curves(series, unit="nats", marks=marks, height=320)
        smoothed = any("median" in one.label for one in series)
        note = "Per token" + ("; thin is each logged step, thick the median around it." if smoothed else ".")
        if compared is not None:
            every = ", ".join(line.label for line in terms)
            note += (
                f" Training loss is the weighted sum of {every}; compare validation with {compared.label}."
            )
        note += dots + dashed
        return Chart(
            "Loss", drawn, note, keys, words="; ".join(words), wide=True, names=("loss", "validation/loss")
        )

    def time(self) -> Section:
        """Return the parts of a step, stacked, and speed."""
        blocks: list[Block] = []
        for each in self.shown:
            parts = step_parts(each.run)
            if parts:
                blocks.append(self._stack(each, parts, "A step's seconds", "s"))
        if not blocks:
            blocks.append(Missing(bring("time")))
        blocks += [*self._named("tokens_per_second"), *self._named("seconds")]
        blocks += self._rest("time")
        return Section("time", GROUPS["time"][0], blocks, "Time")

    def memory(self) -> Section:
        """Return the memory of each rank, and of the fullest one what it is spent on."""
        blocks: list[Block] = []
        for each in self.shown:
            of_run = "" if len(self.shown) == 1 else f" of {each.label}"
            found = memory_of_ranks(each.run)
            self.drawn |= {*rank_histograms(each.run)}
            if found is not None and found.ranks:
                blocks.append(memory_table(found, of_run))
            apart = [*memory_rows(each.run)]
            if apart:
                head = ("memory", "fullest rank", "it has", "mean of ranks", "")
                blocks.append(Table(head, apart, frozenset({1, 2, 3}), f"In the newest logged step{of_run}"))
        if not blocks and not any(self._of("memory")):
            blocks = [Missing(bring("memory"))]
        return Section("memory", GROUPS["memory"][0], [*blocks, *self._rest("memory")])

    def pipeline(self) -> Section:
        """Return the schedule's timeline and the measured bubble."""
        blocks: list[Block] = []
        for each in self.shown:
            blocks += timeline_of(each, alone=len(self.shown) == 1)
        blocks += self._rest("pipeline")
        if not blocks:
            blocks = [Missing("One stage: there is no pipeline in this recipe, and no bubble.")]
        return Section("pipeline", GROUPS["pipeline"][0], blocks)

    def experts(self) -> Section:
        """Return the load of experts."""
        alone = len(self.shown) == 1
        loads = [chart for each in self.shown for chart in load_charts(each, alone=alone)]
        self.drawn |= {name for chart in loads for name in chart.names}
        blocks: list[Block] = [*loads, *self._rest("experts")]
        if not blocks:
            return Section("experts", GROUPS["experts"][0], [Missing("The model has no experts.")])
        by_expert = any("expert" in f.placeholders for each in self.shown for f in each.run.families)
        if not loads and not by_expert:
            blocks.append(Missing(f"The load of each expert is not recorded. {bring('moe')}"))
        return Section("experts", GROUPS["experts"][0], blocks)

    def layers(self) -> Section:
        """Return norms and update ratios, layers by steps."""
        blocks = self._rest("layers")
        if not blocks:
            blocks = [Missing(bring("gradients"))]
        return Section("layers", GROUPS["layers"][0], blocks, "Layers")

    def checkpoints(self, *, verify: bool) -> Section:
        """Return the checkpoints, and what saving them cost."""
        rest = self._families(("reliability",), lambda family: family.metric.name.startswith("checkpoint"))
        return Section("checkpoints", "Checkpoints", [*checkpoints(self.shown, verify=verify), *rest])

    def continuity(self) -> Section:
        """Return restarts and rollbacks, and what share of the time was training."""
        blocks: list[Block] = [*continuity(self.shown)]
        for each in self.shown:
            parts = shares_of_time(each.run)
            if parts:
                blocks.append(self._stack(each, parts, "What the time since the start went into"))
        blocks += self._families(
            ("reliability",), lambda family: not family.metric.name.startswith("checkpoint")
        )
        return Section("continuity", "Restarts and rollbacks", blocks, "Restarts")

    def _stack(self, each: Shown, parts: Sequence[Line], title: str, unit: str = "1") -> Chart:
        """Return curves one above the other: of parts of a step, or else of the time since the start."""
        of_step = unit == "s"
        said = {part.label: float(np.nanmedian(part.values)) if of_step else part.last for part in parts}
        total = sum(said.values())
        keys = [
            Key(f"{part.label} {share(said[part.label] / total)}", COLORS[n % len(COLORS)])
            for n, part in enumerate(parts)
        ]
        self.drawn |= {part.name for part in parts}
        return Chart(
            title if len(self.shown) == 1 else f"{title}, {each.label}",
            stack(parts, unit=unit, marks=marks_of(each)),
            "Shares are of the medians." if of_step else "Shares are those at the newest step.",
            keys,
            words="; ".join(f"{name} {quantity(value, unit)}" for name, value in said.items()),
            wide=True,
            names=tuple(part.name for part in parts),
        )

    def other(self) -> Section | None:
        """Return metrics that no other section has drawn, by group, such as those of unknown plugins."""
        groups = dict.fromkeys(
            family.metric.group
            for each in self.shown
            for family in each.run.families
            if family.metric.name not in self.drawn and not self._drawn(family)
        )
        found = [Group(group, blocks) for group in groups if (blocks := self._families([group]))]
        found += self._histograms()
        return Section("other", "Other metrics", found) if found else None

    def _histograms(self) -> list[Group]:
        from nanotrain_report.histograms import histogram_charts

        alone = len(self.shown) == 1
        charts = [one for each in self.shown for one in histogram_charts(each, self.drawn, alone=alone)]
        return [Group("histograms", charts, folded=len(charts) > MOST_OPEN)] if charts else []

    def _any(self, name: str) -> bool:
        return any(each.run.line(name) is not None for each in self.shown)

    def _of(self, group: str) -> Iterable[Family]:
        return (f for each in self.shown for f in each.run.families if f.metric.group == group)

    def _named(self, name: str) -> list[Chart]:
        if name in self.drawn:
            return []
        self.drawn.add(name)
        return family_charts(self.shown, name)

    def _drawn(self, family: Family) -> bool:
        return all(line.name in self.drawn for line in family.lines)

    def _rest(self, section: str, wanted=lambda family: True) -> list[Block]:  # type: ignore[no-untyped-def]
        return self._families(GROUPS[section][1], wanted)

    def _families(self, groups: Sequence[str], wanted=lambda family: True) -> list[Block]:  # type: ignore[no-untyped-def]
        charts: list[Chart] = []
        still: list[str] = []
        for group in groups:
            for family in self._of(group):
                name = family.metric.name
                if name in self.drawn or self._drawn(family) or not wanted(family):
                    continue
                self.drawn.add(name)
                if name in COUNTERS or (name == "losses/{term}" and len(family.lines) == 1):
                    continue
                if self._constant(name):
                    shown = () if family.placeholders == ("over",) else family.lines  # those are in a table
                    still += [f"{line.name} {quantity(line.last, family.metric.unit)}" for line in shown]
                else:
                    charts += family_charts(self.shown, name)
        blocks: list[Block] = [*charts[:MOST_OPEN]]
        if len(charts) > MOST_OPEN:
            blocks.append(Group(f"{len(charts) - MOST_OPEN} more", charts[MOST_OPEN:], folded=True))
        return blocks + ([Text(f"One value only: {', '.join(still)}.")] if still else [])

    def _constant(self, name: str) -> bool:
        """Return whether the few curves of a declaration have one value each, in all steps of all runs."""
        found = [f.lines for each in self.shown for f in each.run.families if f.metric.name == name]
        one_value = all(
            bool((line.values == found[0][n].values[0]).all())
            for lines in found
            for n, line in enumerate(lines[: len(found[0])])
        )
        return one_value and all(len(lines) == len(found[0]) <= FEW for lines in found)


def bar(part: float) -> str:
    """Return a bar of text as long as a share of its column."""
    return "█" * max(1, round(24 * part))


def memory_table(found: RankMemory, of_run: str) -> Table:
    """Return a row for each rank, the fullest first; what it has now only where that is another number."""
    fullest = sorted(found.ranks, key=lambda rank: -rank[2])[:MOST_RANKS]
    title = f"{found.name} of each rank at step {found.step:,}, the fullest first{of_run}"
    if all(now == most for _, now, most in fullest):
        held = [(rank, quantity(most, found.unit), bar(most / found.peak)) for rank, _, most in fullest]
        return Table(("rank", "most so far", ""), held, frozenset({0, 1}), title)
    rows = [
        (rank, quantity(now, found.unit), quantity(most, found.unit), bar(most / found.peak))
        for rank, now, most in fullest
    ]
    return Table(("rank", "now", "most so far", ""), rows, frozenset({0, 1, 2}), title)
