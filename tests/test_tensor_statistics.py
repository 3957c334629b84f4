"""Statistics and histograms of tensors, whole, in parts and in groups, against those of plain tensors."""

import math
from types import SimpleNamespace

import pytest
import torch
from declared_metric import metric

from nanotrain_core.contracts import Block, Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.metrics import tensor_statistics
from nanotrain_core.metrics.declared import Bins
from nanotrain_core.run.run_info import _optimizer_state
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

DDP = Case("parallel", use="ddp", topology={"dp": 2})


class PublishesTwice(Monitor):
    declared = (metric("x/rms"), metric("x/mean"))

    def on_start(self, run):
        run.metrics.statistics("x/{statistic}", torch.ones(2), of=["rms", "mean"])
        run.metrics.scalar("x/rms", 1.0)


def test_a_statistic_and_a_number_of_one_name_are_refused():
    with pytest.raises(PluginError, match=r"'x/rms' is published twice, as 'x/\{statistic\}' and as 'x/rms'"):
        make_engine(DDP.alone(), {}, callbacks=[PublishesTwice()]).fit()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_long_tensor_is_counted_in_runs(monkeypatch, weighted):
    monkeypatch.setattr(tensor_statistics, "COUNTED", 7)
    values = torch.arange(-3.0, 27.0).view(5, 6)
    values[2, 3] = math.nan
    weights = torch.arange(30.0).view(5, 6) if weighted else None
    found = tensor_statistics.count_into(values, (0.0, 10.0, 20.0), log=False, weights=weights).tolist()
    each = torch.ones(5, 6) if weights is None else weights
    parts = [values < 0, (values >= 0) & (values < 10), (values >= 10) & (values < 20), values >= 20]
    assert found == [each[part].sum().item() for part in (*parts, values.isnan())]


def test_a_histogram_may_bring_bins_and_weights_of_its_own():
    class Own(Monitor):
        declared = (metric("own", kind="histogram"),)

        def __init__(self):
            self.counts = []

        def on_before_update(self, update):
            places, weights = torch.arange(3) + 0.5, torch.tensor([5, 0, 2])
            self.metrics.histogram("own", places, bins=Bins(low=0, high=3, count=3), weight=weights)

        def on_start(self, run):
            self.metrics = run.metrics

        def on_metrics(self, report):
            self.counts.append(report.histograms["own"].counts)

    monitor = Own()
    make_engine(DDP.alone(), {"run": {"steps": 2}}, callbacks=[monitor]).fit()
    assert monitor.counts == [(5, 0, 2)] * 2


class Deviation(Monitor):
    """Publishes the standard deviation of two tensors, which are parts of one."""

    declared = (metric("std/x"),)

    def __init__(self, parts):
        self.parts, self.told = parts, {}

    def on_start(self, run):
        self.metrics = run.metrics

    def on_after_update(self, update):
        for part in self.parts:
            self.metrics.statistics("{statistic}/x", part, ("std",))

    def on_metrics(self, report):
        self.told = report.values


@pytest.mark.parametrize("std", [1e-3, 1e-4, 1e-5])
def test_the_standard_deviation_is_that_of_elements_close_to_each_other(std):
    """Those of a norm's weight are close to 1: their squares, rounded to float32, differ by less."""
    x = 1 + std * torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    monitor = Deviation(list(x))
    make_engine(DDP.alone(), {"run": {"steps": 1}}, callbacks=[monitor]).fit()
    assert monitor.told["std/x"] == pytest.approx(x.double().std(correction=0).item(), rel=1e-4)


@pytest.mark.full
def test_tensors_of_a_group_are_one_large_tensor():
    """Those that two ranks hold are measured by one of them, and nothing is counted twice."""
    for found, plain in run_ranks(grouped, 2, DDP):
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


class Groups(Monitor):
    declared = tuple(metric(f"{each}/{{block}}") for each in ("norm", "max_abs", "mean"))

    def on_start(self, run):
        self.run, self.told = run, {}

    def on_before_update(self, update):
        of = ("norm", "max_abs", "mean")
        self.run.metrics.placed("{statistic}/{parameter}", self.run.weights(), of, group=first_word)

    def on_metrics(self, report):
        self.told = {name: report.values[name] for name in report.published}


def first_word(name):
    return name.partition(".")[0]


def grouped(case):
    monitor = Groups()
    engine = make_engine(case, {"run": {"steps": 1}}, callbacks=[monitor])
    groups = {}
    for placed in engine.run.placed:
        groups.setdefault(first_word(placed.placement.name), []).append(placed.parameter.detach().flatten())
    plain = {}
    for name, tensors in groups.items():
        x = torch.cat(tensors)
        plain |= {f"norm/{name}": x.norm().item(), f"max_abs/{name}": x.abs().max().item()}
        plain[f"mean/{name}"] = x.mean().item()
    engine.fit()
    return monitor.told, plain


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("state", [(0,), (1,), (0, 1), ()])
def test_state_with_some_axes_of_a_parameter_is_yielded_once(axis, state):
    """Of a weight [4, 8] divided along an axis, then into ranges: each had counted a mean over rows."""
    found = []
    for part in range(2):
        shape, offset = ((2, 8), (2 * part, 0)) if axis == 0 else ((4, 4), (0, 4 * part))
        where = Placement("w", (4, 8), shape, offset)
        for span in ((0, 8), (8, 16)):
            shape, offset, total = (
                tuple(each[number] for number in state) or (3,)
                for each in (where.shape, where.offset, where.global_shape)
            )
            block = Block("mean/w", total, offset if state else (0,), torch.ones(shape))
            run = SimpleNamespace(
                gradients=SimpleNamespace(pieces=lambda s=span, w=where: [Piece(torch.ones(1), w, s)]),
                optimizer=SimpleNamespace(blocks_of=lambda names, b=block: [b]),
            )
            found += [block.offset for _ in _optimizer_state(run, "mean")]
    rows, columns = ([(0,), (2,)], [(0,)]) if axis == 0 else ([(0,)], [(0,), (4,)])
    divided = [(0, 0), (2, 0)] if axis == 0 else [(0, 0), (0, 4)]  # by rank: each range has a box of its own
    each_range = [offset for offset in divided for _ in range(2)]
    assert found == {(0,): rows, (1,): columns, (0, 1): each_range, (): [(0,)]}[state]
