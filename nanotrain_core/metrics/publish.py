"""The interface through which a monitor publishes metrics: ``run.metrics``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import attrs
import structlog
import torch

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Placement
from nanotrain_core.metrics.declared import OVER, STATISTICS, Bins, Metric, Reduce, Statistic, check_name
from nanotrain_core.metrics.gathered import Gathered, Number, Spec
from nanotrain_core.metrics.reducer import MetricReducer, is_of_core
from nanotrain_core.metrics.tensor_statistics import COUNT, NONFINITE, SUM, count_into, norms_of


class Metrics:
    """Publishes under names that the monitor declares, at any time and on any rank.

    Values published between two logged steps are reduced over all ranks with the second, and passed to
    every monitor in ``on_metrics``: on a CPU right after that step's ``on_step``, elsewhere one logged step
    later. An evaluation does the same right after its ``on_evaluation``. A device value stays on the device:
    nothing here synchronizes or calls a collective.
    """

    def __init__(self, reducer: MetricReducer, owner: int, name: str, *, strict: bool) -> None:
        """Publish for the monitor ``name``, at index ``owner``; ``strict``: declared names only."""
        self._reducer, self._owner, self._name, self._strict = reducer, owner, name, strict
        self._specs: dict[str, Spec] = {}
        self._own: dict[tuple[Any, ...], bool] = {}
        """For each set of blocks seen so far, whether this rank measures them."""

    def scalar(
        self,
        name: str,
        value: Number,
        *,
        unit: str | None = None,
        reduce: Reduce | None = None,
        weight: Number = 1.0,
    ) -> None:
        """Publish a number.

        Args:
            name: declared, or of a declared pattern: ``gradients/norm/layers.0.attn.q.weight``.
            value: a Python number, or a tensor of one element on any device.
            unit: as declared; for an undeclared name, its unit.
            reduce: as declared; for an undeclared name ``mean`` by default.
            weight: for a mean, the value's weight, such as the number of tokens it is the mean over.

        Raises:
            PluginError: the name is not this monitor's to publish, or is declared differently.
        """
        spec = self._specs.get(name)
        plain = unit is None and reduce is None  # as most are
        if spec and spec.is_mean and plain and type(value) is float and type(weight) is float:
            return self._reducer.add(spec, 0, value, weight)
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise PluginError(f"the metric '{name}' has {value.numel()} values; expected one number")
        if spec is None or not spec.is_number or unit is not None or reduce is not None:
            spec = self._spec(name, "scalar", unit=unit, reduce=reduce)
        self._reducer.take(spec).scalar(value, weight)

    def per_rank(self, name: str, value: float) -> None:
        """Publish a value of this rank, to report how ranks differ.

        Reported are the largest of all ranks, the mean, the lower median, and which rank has the largest.
        Values that a rank publishes between two logged steps are averaged. Publish it in every logged step,
        or on all ranks in the same ones: nothing is reported for a step in which a rank is missing that has
        published it before. Each rank's value has its own position in the sums: with a thousand ranks it is
        as long as a histogram of a thousand bins.

        Args:
            name: ``memory/allocated/{over}``, where ``{over}`` stands for ``max``, ``mean``, ``median`` and
                ``rank``: all four names are declared.
            value: a Python number.
        """
        spec = self._specs.get(name)
        if spec is None or not spec.ranks:
            spec = self._spec(name, "scalar", ranks=self._reducer.mesh.world_size)
        self._reducer.add(spec, self._reducer.mesh.rank, value)

    def histogram(
        self, name: str, values: torch.Tensor, *, bins: Bins | None = None, weight: Number = 1.0
    ) -> None:
        """Publish the distribution of a tensor's elements, counted over all ranks in the declared bins.

        Args:
            name: declared as a histogram.
            values: floating-point, of any shape.
            bins: for a name that is undeclared, or is declared without bins.
            weight: each element's weight, for example 1 / ``placement.replicas(layout)``; a tensor of the
                shape of ``values`` has a weight for each.

        Raises:
            PluginError: no bins are given or declared.
        """
        spec = self._spec(name, "histogram", bins=bins)
        if spec.metric.bins is None:
            raise PluginError(f"the metric '{name}' is declared without bins: publish it with some")
        edges, log = spec.metric.bins.edges, spec.metric.bins.log
        if isinstance(weight, torch.Tensor):
            self._reducer.take(spec).add(0, count_into(values, edges, log=log, weights=weight))
            return
        counts = count_into(values, edges, log=log)
        self._reducer.take(spec).add(0, counts if weight == 1.0 else counts * weight)

    def text(self, name: str, text: str) -> None:
        """Publish a text. If several ranks do, the lowest rank's is kept; it costs a gather in that step."""
        self._reducer.texts[name] = (str(text), self._spec(name, "text").metric)

    def statistics(
        self,
        name: str,
        tensor: torch.Tensor,
        of: Sequence[Statistic] = ("rms", "mean", "max_abs"),
    ) -> None:
        """Publish statistics of a tensor of which ranks hold parts, each element equally often.

        This holds for activations, whether ranks along tp hold all of them or a shard. Several tensors
        published under one name, such as those of microbatches, are parts of one tensor.

        Args:
            name: ``residual/{statistic}/layers.3``, where ``{statistic}`` stands for ``rms`` and so on.
            tensor: floating-point.
            of: which of :data:`~nanotrain_core.metrics.declared.STATISTICS`, except ``norm`` and
                ``nonfinite``; ``max_abs`` shows whether an element is not finite.

        Raises:
            PluginError: it is one of those.
        """
        if refused := {"norm", "nonfinite"} & {*of}:
            raise PluginError(
                f"{min(refused)} counts each element once: publish tensors with their placements, by placed()"
            )
        self._measured([(name, tensor)], of)

    def placed(
        self,
        name: str,
        tensors: Iterable[tuple[torch.Tensor, Placement]],
        of: Sequence[Statistic] = ("norm",),
        *,
        group: Callable[[str], str] | None = None,
    ) -> None:
        """Publish statistics of each of many tensors of the model, from this rank's blocks or ranges.

        Exact on every layout, if all ranks call it: a block that several ranks hold is measured by one of
        them, as given by :meth:`measures`.

        Args:
            name: ``weights/{statistic}/{parameter}``, where ``{parameter}`` stands for each tensor's global
                name. Without that, they are treated as one large tensor.
            tensors: with their placements.
            of: which of :data:`~nanotrain_core.metrics.declared.STATISTICS`.
            group: the value of ``{parameter}`` instead of a tensor's name, such as the name of its layer.
                Tensors of one group are treated as one large tensor.
        """
        called = group or str
        self._measured(
            [
                (name.replace("{parameter}", called(p.name)), tensor)
                for tensor, p in tensors
                if self.measures(p)
            ],
            of,
        )

    def measures(self, placement: Placement) -> bool:
        """Return whether this rank measures its block, among all ranks that hold the same block.

        Tensors are distributed by name, so that the ranks share the work.
        """
        key = (placement.name, placement.view, placement.summed, placement.same, placement.stages)
        if key not in self._own:
            mesh = self._reducer.mesh
            members = mesh.layout.members(mesh.rank, placement.replica_span(mesh.layout))
            self._own[key] = members[zlib.crc32(placement.name.encode()) % len(members)] == mesh.rank
        return self._own[key]

    def _measured(self, found: Sequence[tuple[str, torch.Tensor]], of: Sequence[Statistic]) -> None:
        statistics, several = tuple(of), dict[str, Gathered]()
        full = [(name, each.detach()) for name, each in found if each.numel()]
        for name, _ in full:
            if name not in several:
                spec = self._specs.get(name)
                if spec is None or spec.statistics != statistics:
                    spec = self._spec(name, "scalar", statistics=statistics)
                several[name] = self._reducer.take(spec)
        for device in {each.device for _, each in full}:  # state may be offloaded
            self._measured_on([each for each in full if each[1].device == device], several, {*of})

    @staticmethod
    def _measured_on(
        full: Sequence[tuple[str, torch.Tensor]], several: Mapping[str, Gathered], of: Set[Statistic]
    ) -> None:
        """Accumulate the sums for statistics. They stay separate until all names' sums are packed."""
        tensors = [each for _, each in full]
        wide = torch.float64 if "std" in of else torch.float32
        squares = {"norm", "rms", "std"} & of
        norms: Sequence[Sequence[Any]] = norms_of(tensors, wide) if squares else [[]] * len(full)
        for (name, _), each, own in zip(full, tensors, norms, strict=True):
            gathered = several[name]
            gathered.add(COUNT, each.numel())
            gathered.norms(own)
            if {"mean", "std"} & of:
                gathered.add(SUM, each.sum(dtype=torch.float64))
            if "nonfinite" in of:
                gathered.add(NONFINITE, torch.isfinite(each).logical_not_().sum().double())
            if "max_abs" in of:
                gathered.ends(each)

    # --- declarations ------------------------------------------------------------------------

    def _spec(
        self, name: str, kind: Any, *, statistics: tuple[Statistic, ...] = (), ranks: int = 0, **said: Any
    ) -> Spec:
        """Return the declaration of a name, looked up once; warn if it is undeclared."""
        said = {key: value for key, value in said.items() if value is not None}
        found = self._specs.get(name)
        if found is None:
            found = self._specs[name] = Spec(
                name, self._owner, self._metric(name, kind, statistics, ranks, said), statistics, ranks=ranks
            )
        metric = found.metric
        wrong = next((key for key, value in said.items() if getattr(metric, key) != value), None)
        if metric.kind != kind or wrong or (found.statistics, found.ranks) != (statistics, ranks):
            raise PluginError(
                f"the metric '{name}' is published as a {kind} with {said or statistics}; it is a "
                f"{metric.kind}, {metric.reduce}, in '{metric.unit}', with statistics {found.statistics}"
            )
        return found

    def _metric(
        self, name: str, kind: Any, statistics: tuple[Statistic, ...], ranks: int, said: dict[str, Any]
    ) -> Metric:
        if unknown := {*statistics} - {*STATISTICS}:
            raise PluginError(f"no statistic '{min(unknown)}'; expected some of {', '.join(STATISTICS)}")
        names = self._reducer.names[self._owner]
        full = [name.replace("{statistic}", each) for each in statistics] or [name]
        if ranks:
            full = [name.replace("{over}", each) for each in OVER]
        metric = None
        for each in full:
            check_name(each)
            if is_of_core(each):
                raise PluginError(f"the metric '{each}' is the core's: call yours otherwise")
            metric = names.find(each)
            if metric is None:
                self._undeclared(each, names.near(each))
        if metric is not None and not statistics and not ranks:
            own = metric.bins is None and metric.kind == "histogram"
            return attrs.evolve(metric, bins=said.get("bins")) if own else metric
        return attrs.evolve(
            metric or Metric(name=full[0], kind=kind, group=self._name, summary="", **{"unit": "1", **said}),
            name=full[0] if statistics or ranks else name,
        )

    def _undeclared(self, name: str, near: str) -> None:
        text = f"{self._name} publishes the metric '{name}', which it does not declare{near}"
        if self._strict:
            raise PluginError(
                f"{text}: add a Metric to the component's `metrics`, or to the class's `declared` in a script"
            )
        structlog.get_logger("nanotrain.metrics").warning(text)
