"""What a monitor publishes metrics with: ``run.metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import structlog
import torch

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Placement
from nanotrain_core.metrics.board import Board, is_of_core
from nanotrain_core.metrics.declared import Bins, Metric, Reduce, check_name
from nanotrain_core.metrics.gathered import Number, Spec
from nanotrain_core.metrics.measure import COUNT, STATISTICS, SUM, Statistic, count_into, measure


class Metrics:
    """Publishes under names that the monitor declares, at any time and on any rank.

    What is published between two logged steps is reduced over all ranks with the second of them, and told to
    every monitor in ``on_metrics``: on a CPU right after that step's ``on_step``, elsewhere one logged step
    later. A number of the device is taken as it is: nothing here waits for it or calls a collective.
    """

    def __init__(self, board: Board, owner: int, name: str, *, strict: bool) -> None:
        """Publish for the monitor ``name``, the ``owner``-th of the run; ``strict``: declared names alone."""
        self._board, self._owner, self._name, self._strict = board, owner, name, strict
        self._specs: dict[str, Spec] = {}

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
            unit, reduce: as declared; of a name that is not declared, its own (``mean`` by default).
            weight: of a mean, what the value counts, as the tokens that it is the mean of.

        Raises:
            PluginError: the name is not the monitor's to publish, or is declared otherwise.
        """
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise PluginError(f"the metric '{name}' has {value.numel()} values; expected one number")
        self._board.take(self._spec(name, "scalar", unit=unit, reduce=reduce)).scalar(value, weight)

    def histogram(
        self, name: str, values: torch.Tensor, *, bins: Bins | None = None, weight: float = 1.0
    ) -> None:
        """Publish how the elements of a tensor are distributed, counted over all ranks in the declared bins.

        Args:
            name: declared as a histogram.
            values: floating-point, of any shape.
            bins: of a name that is not declared.
            weight: what each element counts, for example 1 / ``placement.replicas(layout)``.
        """
        spec = self._spec(name, "histogram", bins=bins)
        assert spec.metric.bins is not None
        counts = count_into(values, spec.metric.bins.edges, log=spec.metric.bins.log)
        self._board.take(spec).add(0, counts if weight == 1.0 else counts * weight)

    def text(self, name: str, text: str) -> None:
        """Publish a text. Of several ranks, that of the lowest is told, and costs a gather in that step."""
        self._board.texts[name] = (str(text), self._spec(name, "text").metric)

    def statistics(
        self,
        name: str,
        tensor: torch.Tensor,
        of: Sequence[Statistic] = ("rms", "mean", "max_abs"),
    ) -> None:
        """Publish statistics of a tensor of which ranks hold parts, each element equally often.

        So are activations, whether ranks along tp hold all of them or a share. Several tensors published
        under one name, as those of microbatches, are parts of one.

        Args:
            name: ``residual/{statistic}/layers.3``, where ``{statistic}`` stands for ``rms`` and so on.
            tensor: floating-point.
            of: which of :data:`~nanotrain_core.metrics.measure.STATISTICS`, but neither norm nor
                nonfinite: ``max_abs`` tells whether an element is not finite.

        Raises:
            PluginError: it is one of those.
        """
        if refused := {"norm", "nonfinite"} & {*of}:
            raise PluginError(
                f"{min(refused)} counts each element once: publish tensors with their placements, by placed()"
            )
        self._measured([(name, tensor, 1.0)], of)

    def placed(
        self,
        name: str,
        tensors: Iterable[tuple[torch.Tensor, Placement]],
        of: Sequence[Statistic] = ("norm",),
    ) -> None:
        """Publish statistics of each of many tensors of the model, from this rank's blocks or ranges of them.

        Exact on every layout: a block that n ranks hold counts 1/n on each.

        Args:
            name: ``weights/{statistic}/{parameter}``, where ``{parameter}`` stands for each tensor's global
                name. Without that, they are one large tensor.
            tensors: with their placements.
            of: which of :data:`~nanotrain_core.metrics.measure.STATISTICS`.
        """
        layout = self._board.mesh.layout
        self._measured(
            [(name.replace("{parameter}", p.name), t, 1.0 / p.replicas(layout)) for t, p in tensors], of
        )

    def _measured(self, found: Sequence[tuple[str, torch.Tensor, float]], of: Sequence[Statistic]) -> None:
        if unknown := {*of} - {*STATISTICS}:
            raise PluginError(f"no statistic '{min(unknown)}'; expected some of {', '.join(STATISTICS)}")
        full = [(name, each, weight) for name, each, weight in found if each.numel()]
        for device in {each.device for _, each, _ in full}:  # state may be offloaded
            self._measured_on([each for each in full if each[1].device == device], of)

    def _measured_on(self, full: Sequence[tuple[str, torch.Tensor, float]], of: Sequence[Statistic]) -> None:
        device = self._board.mesh.device
        sums, most = (each.to(device, non_blocking=True) for each in measure([x for _, x, _ in full], of))
        if any(weight != 1.0 for *_, weight in full):
            weights = torch.tensor([weight for *_, weight in full], dtype=torch.float64)
            sums = sums * weights.to(sums.device, non_blocking=True).unsqueeze(1)
        rows = zip(full, sums.unbind(), most.unbind(), strict=True)
        for (name, each, weight), row, top in rows:
            gathered = self._board.take(self._spec(name, "scalar", statistics=tuple(of)))
            gathered.add(SUM, row)
            gathered.add(COUNT, each.numel() * weight)
            if "max_abs" in of:
                gathered.top(top)

    # --- declarations ------------------------------------------------------------------------

    def _spec(self, name: str, kind: Any, *, statistics: tuple[Statistic, ...] = (), **said: Any) -> Spec:
        """Return what is known of a name, told once; warn of one that is not declared."""
        said = {key: value for key, value in said.items() if value is not None}
        found = self._specs.get(name)
        if found is None:
            found = self._specs[name] = Spec(
                name, self._owner, self._metric(name, kind, statistics, said), statistics
            )
        metric = found.metric
        wrong = next((key for key, value in said.items() if getattr(metric, key) != value), None)
        if metric.kind != kind or wrong or found.statistics != statistics:
            raise PluginError(
                f"the metric '{name}' is published as a {kind} with {said or statistics}; it is a "
                f"{metric.kind}, {metric.reduce}, in '{metric.unit}', with statistics {found.statistics}"
            )
        return found

    def _metric(
        self, name: str, kind: Any, statistics: tuple[Statistic, ...], said: dict[str, Any]
    ) -> Metric:
        names = self._board.names[self._owner]
        told = [name.replace("{statistic}", each) for each in statistics] or [name]
        metric = None
        for each in told:
            check_name(each)
            if is_of_core(each):
                raise PluginError(f"the metric '{each}' is the core's: call yours otherwise")
            metric = names.find(each)
            if metric is None:
                self._undeclared(each, names.near(each))
        if metric is not None and not statistics:
            return metric
        return attrs.evolve(
            metric or Metric(name=told[0], kind=kind, group=self._name, summary="", **{"unit": "1", **said}),
            name=name if not statistics else told[0],
        )

    def _undeclared(self, name: str, near: str) -> None:
        text = f"{self._name} publishes the metric '{name}', which it does not declare{near}"
        if self._strict:
            raise PluginError(
                f"{text}: add a Metric to the component's `metrics`, or to the class's `declared` in a script"
            )
        structlog.get_logger("nanotrain.metrics").warning(text)
