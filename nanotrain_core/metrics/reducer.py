"""Reduces what monitors publish: one SUM and one MAX all-reduce over the world per logged step.

Every name has a fixed position in both buffers. Ranks agree on names once: a rank that has published one
without a position signals it in the SUM itself, and only then do all ranks gather the new names and reduce
those of that step separately. So ranks may publish different names, such as those of other pipeline stages,
and a step without new names needs no extra communication.

On a CPU a step's values are read immediately; elsewhere after the next logged step, when they have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import attrs
import torch

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.declared import Metric, Names, check_distinct
from nanotrain_core.metrics.gathered import Gathered, Spec
from nanotrain_core.metrics.pack import pack
from nanotrain_core.metrics.report import Histogram, MetricsReport
from nanotrain_core.metrics.table import Table
from nanotrain_core.metrics.tensor_statistics import histogram

#: Sets of names whose declarations are kept: those of a step in which tensors are read, of an evaluation.
MOST_KEPT = 64

_CORE = Names(CORE)


def is_of_core(name: str) -> bool:
    """Return whether the core publishes a metric of that name."""
    return _CORE.find(name) is not None


def of_core(step: int, values: Mapping[str, float]) -> MetricsReport:
    """Return a report with only metrics of the core."""
    return MetricsReport(step, values, metrics=dict(_declared(*values)))


@lru_cache(maxsize=64)
def _declared(*names: str) -> dict[str, Metric]:
    return {name: metric for name in names if (metric := _CORE.find(name)) is not None}


@attrs.define(eq=False)
class Sent:
    """A step's values in flight."""

    step: int
    values: Mapping[str, float]
    """The core's values, which every rank already has."""
    table: Table
    news: Mapping[str, Gathered]
    """Values that this rank has published under new names."""
    texts: Mapping[str, tuple[str, Metric]]
    numbers: torch.Tensor
    """As returned by :func:`~nanotrain_core.metrics.pack.pack`, over all ranks; on the host once
    ``arrived``."""
    arrived: torch.Event | None


class MetricReducer:
    """Collects the metrics that the monitors of one rank publish, and reduces them over all ranks."""

    def __init__(self, mesh: Mesh, declared: Mapping[str, Sequence[Metric]]) -> None:
        """Create the reducer.

        Args:
            mesh: of the run.
            declared: the declarations of each monitor of the run, by its name, in order.

        Raises:
            PluginError: two declarations of a monitor overlap.
        """
        self.mesh = mesh
        self.owners = [*declared]
        for metrics in declared.values():
            check_distinct(metrics)
        self.names = [Names(metrics) for metrics in declared.values()]
        self._publishers: dict[str, set[int]] = {}
        """By the name of each per-rank value: the ranks that have published it so far."""
        self._failed = [0.0] * len(declared)
        """How often each monitor failed on this rank since the last logged step."""
        self.table = Table()
        """Names with a position."""
        self._told_as: dict[str, str] = {}
        """For each value's name, the published name: for statistics a name with ``{statistic}``."""
        self._metrics: dict[str, Metric] = {}
        """The declaration of each value of the table."""
        self._metrics_by_names: dict[tuple[tuple[str, ...], frozenset[str]], Mapping[str, Metric]] = {}
        """What :meth:`_metrics_of` has returned."""
        self.gathered: dict[str, Gathered] = {}
        """Values published since the last logged step that are not in the table's sums."""
        self._any_new = False
        """Whether a name has been published since the last logged step that had no position then."""
        self.texts: dict[str, tuple[str, Metric]] = {}
        self._waiting: Sent | None = None
        self.late = mesh.device_is_async

    # --- what monitors publish ---------------------------------------------------------------

    def add(self, spec: Spec, place: int, value: float, weight: float = 1.0) -> None:
        """Add ``value * weight`` to the sum number ``place`` of a mean or a per-rank value, and the weight to
        the sum that counts it."""
        at = self.table.places.get(spec.name)
        known = at if at and at[2] is spec else None
        sums, first = (self.table.sums, known[1]) if known else (self.take(spec).sums, 0)
        sums[first + place] += value * weight if weight else 0.0
        sums[first + place + (spec.ranks or 1)] += weight

    def take(self, spec: Spec) -> Gathered:
        """Return where to accumulate values of a name.

        Raises:
            PluginError: another monitor publishes it, or one of its statistics has a name of its own.
        """
        found = self.gathered.get(spec.name)
        if found is not None and found.spec is spec:
            return found
        known = found.spec if found else self.table.get(spec.name)
        if known is None:
            self._check_values(spec)
            self._any_new = True
        elif known is not spec:
            if known != spec:
                raise PluginError(f"the metric '{spec.name}' is published by two monitors of this run")
            if found is None:
                self.table.adopt(spec)  # from now on an identity check suffices
        if found is None:
            found = self.gathered[spec.name] = Gathered(spec, self.mesh.device)
        return found

    def _check_values(self, spec: Spec) -> None:
        """Reject a name if one of its values has another name: ``x/{statistic}`` includes ``x/rms``."""
        for name in spec.names:
            other = self._told_as.setdefault(name, spec.name)
            if other != spec.name:
                text = f"the metric '{name}' is published twice, as '{other}' and as '{spec.name}'"
                raise PluginError(text)

    def fail(self, owner: int) -> None:
        """Record that a monitor has failed: what it published since the last logged step is discarded."""
        self._failed[owner] += 1

    # --- a logged step -----------------------------------------------------------------------

    def logged(self, step: int, values: Mapping[str, float]) -> list[MetricsReport]:
        """Reduce what was published until now, and return the reports that are complete. Collective.

        Args:
            step: the logged one.
            values: metrics of the core, the same on every rank.
        """
        reports, sent = self.rest(), self._send(step, values)
        if self.late:
            self._waiting = sent
            return reports
        return [*reports, self._read(sent)]

    def rest(self) -> list[MetricsReport]:
        """Wait for values in flight and return their reports. Collective, if there are any."""
        before, self._waiting = self._waiting, None
        return [self._read(before)] if before is not None else []

    def last(self, step: int) -> list[MetricsReport]:
        """Return :meth:`rest`, and a report of what was published since the last logged step. Collective.

        ``step``: that of an evaluation, or the last of the run.
        """
        reports = self.rest()
        if any(names.metrics for names in self.names):
            reports += [found for found in [self._read(self._send(step, {}))] if found.published]
        return reports

    def forget(self) -> None:
        """Discard values in flight and later ones: the run rolls back to before them."""
        self._waiting = None
        self.table.take()
        self.gathered, self.texts = {}, {}

    def _send(self, step: int, values: Mapping[str, float]) -> Sent:
        gathered, self.gathered = self.gathered, {}
        texts, self.texts = self.texts, {}
        table = self.table
        searched, self._any_new = gathered if self._any_new else {}, False
        news = {name: each for name, each in searched.items() if each.spec != table.get(name)}
        placed = {name: each for name, each in gathered.items() if name not in news} if news else gathered
        header, self._failed = [float(bool(news or texts)), *self._failed], [0.0] * len(self.owners)
        numbers, arrived = self._reduce(table, placed, header), None
        if self.mesh.device.type != "cpu":
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.Event(self.mesh.device)
            arrived.record()
        return Sent(step, values, table, news, texts, numbers, arrived)

    def _read(self, sent: Sent) -> MetricsReport:
        """Return a step's report; agree on new names, if any rank has one."""
        if sent.arrived is not None:
            sent.arrived.synchronize()
        numbers, count = sent.numbers.tolist(), len(self.owners)
        news, failures, ranks = numbers[0], numbers[1 : 1 + count], numbers[len(numbers) - count :]
        failed = {n for n, times in enumerate(failures) if times}
        values, histograms = self._decode(sent.table, numbers[1 + count :], failed)
        texts: dict[str, tuple[str, Metric]] = {}
        if news:
            added, texts = self._agree(sent)
            rest = self._reduce(added, sent.news, [0.0] * (1 + count)).tolist()
            new_values, new_histograms = self._decode(added, rest[1 + count :], failed)
            values, histograms = values | new_values, histograms | new_histograms
        published = frozenset([*values, *histograms, *texts])
        return MetricsReport(
            step=sent.step,
            values={**sent.values, **values},
            histograms=histograms,
            texts={name: text for name, (text, _) in texts.items()},
            metrics=self._metrics_of(tuple(sent.values), published, texts),
            failed={self.owners[n]: int(ranks[n]) for n in sorted(failed)},
            published=published,
        )

    def _metrics_of(
        self,
        core: tuple[str, ...],
        published: frozenset[str],
        texts: Mapping[str, tuple[str, Metric]],
    ) -> Mapping[str, Metric]:
        """Return the declarations of a report's names. Most steps have the names of an earlier one."""
        found = None if texts else self._metrics_by_names.get((core, published))
        if found is None:
            known = self._metrics | {name: metric for name, (_, metric) in texts.items()}
            found = {**_declared(*core), **{name: known[name] for name in published}}
            if len(self._metrics_by_names) == MOST_KEPT:
                self._metrics_by_names.clear()
            if not texts:
                self._metrics_by_names[core, published] = found
        return found

    def _agree(self, sent: Sent) -> tuple[Table, dict[str, tuple[str, Metric]]]:
        """Gather new names and texts, assign positions to the names, and return both. Collective.

        Raises:
            PluginError: ranks use one name with different meanings.
        """
        mine = ([each.spec for each in sent.news.values()], sent.texts)
        everyone: list[tuple[list[Spec], dict[str, tuple[str, Metric]]]] = self.mesh.gather(mine)
        added: dict[str, Spec] = {}
        texts: dict[str, tuple[str, Metric]] = {}
        for rank, (specs, said) in enumerate(everyone):
            texts = {**said, **texts}  # if several ranks publish one, the lowest rank's
            for spec in specs:
                agreed = sent.table.get(spec.name) or added.setdefault(spec.name, spec)
                if agreed != spec:
                    raise PluginError(
                        f"ranks publish the metric '{spec.name}' differently: {spec.metric} on rank {rank}, "
                        f"{agreed.metric} on another"
                    )
        new = [added[name] for name in sorted(added)]
        for spec in new:
            self._check_values(spec)
        known = (spec for _, _, spec in self.table.places.values())  # which keep their positions
        self.table = Table([*known, *new], self.table.sums[: self.table.width])
        self._metrics |= {name: spec.metric_of(name, self.names) for spec in new for name in spec.names}
        return Table(new), texts

    def _reduce(
        self, table: Table, gathered: Mapping[str, Gathered], header: Sequence[float]
    ) -> torch.Tensor:
        """Return the result of :func:`pack` over all ranks. Two all-reduces, at the same time.

        Header: whether there are new names, and how often each monitor failed; the rank it failed on is at
            the end of the buffer.
        """
        ranks = [float(self.mesh.rank) if times else -math.inf for times in header[1:]]
        numbers = pack(table, gathered, self.mesh.device, header, ranks)
        length = len(header) + table.width
        self.mesh.all_reduce_sum_and_max(numbers[:length], numbers[length:])
        return numbers

    def _decode(
        self, table: Table, numbers: Sequence[float], failed: Collection[int]
    ) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Return the numbers, and the histograms, of all names of ``table`` that any rank published, except
        those of monitors that ``failed``."""
        most = table.width  # where maxima begin: after all sums
        values: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for number, first, spec in table.published(numbers):
            if failed and spec.owner in failed:
                continue
            if spec.is_mean:  # most are: without a call
                values[spec.name] = numbers[first] / numbers[first + 1]
                continue
            if spec.is_number:
                values[spec.name] = spec.scalar(numbers[first], numbers[first + 1], numbers[most + number])
                continue
            sums = numbers[first : first + spec.width]
            if not any(sums) or not self._is_complete(spec, sums):
                continue
            if spec.metric.bins is not None:
                histograms[spec.name] = histogram(spec.metric.bins.edges, sums)
            else:
                values.update(spec.read(sums, numbers[most + number]))
        return values, histograms

    def _is_complete(self, spec: Spec, sums: Sequence[float]) -> bool:
        """Return whether every rank that has published this per-rank value before has now done so too.

        Otherwise the value is not reported, since it would not cover all of these ranks.
        """
        if not spec.ranks:
            return True
        present = {rank for rank, count in enumerate(sums[spec.ranks :]) if count}
        known = self._publishers.setdefault(spec.name, present)
        known |= present
        return present == known
