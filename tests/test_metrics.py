"""What monitors publish: every name's value is the whole run's, on every rank, from two all-reduces."""

import json
import math
from collections import Counter

import attrs
import pytest
import torch
from declared_metric import metric
from structlog.testing import capture_logs

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.metrics.declared import Bins, rank_metrics
from nanotrain_core.metrics.gathered import MOST_WAITING, Gathered, Spec
from nanotrain_core.metrics.pack import pack
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.metrics.reducer import MetricReducer
from nanotrain_core.metrics.table import Table
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.collectives import CollectiveLog
from nanotrain_core.testing.probe import make_engine

DDP = Case("parallel", use="ddp", topology={"dp": 2})
REDUCTIONS = ("sum", "mean", "max", "min", "last")


class Publishes(Monitor):
    """Publishes in every step what differs between ranks, and keeps what it is told."""

    declared = (
        *(metric(f"{reduce}/{{what}}", reduce=reduce) for reduce in REDUCTIONS),
        metric("weighted", reduce="mean"),
        metric("spread", kind="histogram", bins=Bins(low=-1.0, high=1.0, count=2)),
        metric("said", kind="text"),
        *rank_metrics("each", "of each rank", unit="s", group="test"),
        *rank_metrics("one", "of one rank", unit="s", group="test"),
        *rank_metrics("some", "of both ranks, then of one", unit="s", group="test"),
    )
    rank = 0

    def __init__(self):
        self.told = []

    def on_start(self, run):
        self.metrics, self.rank = run.metrics, run.rank

    def on_before_update(self, update):
        for reduce in REDUCTIONS:
            value = 10.0 * update.step + self.rank
            self.metrics.scalar(f"{reduce}/host", value)
            self.metrics.scalar(f"{reduce}/device", torch.tensor(value, dtype=torch.float32))
            self.metrics.scalar(f"{reduce}/nan", torch.tensor(math.nan if self.rank else 1.0))
            self.metrics.scalar(f"{reduce}/of.rank.{self.rank}", 1)
        self.metrics.per_rank("each/{over}", 10.0 * update.step - self.rank)
        if self.rank or update.step not in (3, 4):
            self.metrics.per_rank("some/{over}", 1.0 + self.rank)
        if update.step == 3:
            self.metrics.scalar("max/late", -7.0)
            if self.rank:
                self.metrics.per_rank("one/{over}", math.nan)
                self.metrics.text("said", f"by rank {self.rank}")
        self.metrics.scalar("weighted", 1.0 + self.rank, weight=torch.tensor(1 + 2 * self.rank))
        self.metrics.histogram("spread", torch.tensor([-5.0, -1.0, 0.0, 0.5, 1.0, math.nan, math.inf]))

    def on_metrics(self, report):
        self.told.append(report)


def publish(case, changes, late, kind=Publishes, **options):
    """Return what a monitor is told, and the names of collectives."""
    with pytest.MonkeyPatch.context() as patched:
        if late:
            patched.setattr(Mesh, "device_is_async", True)
        engine = make_engine(case, changes, callbacks=[kind()], **options)
        log = CollectiveLog()
        with log:
            engine.fit()
    return getattr(engine.run.monitors[-1], "told", []), [name for name, *_ in log.entries]


def without_clock(report):
    """Return values but those that a rank reads from its own clock, histograms and texts."""
    values = {name: x for name, x in report.values.items() if name not in ("seconds", "tokens_per_second")}
    return values, report.histograms, report.texts


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "late"])
def told(request):
    changes = {"run": {"steps": 5, "log_every": 2}}
    return run_ranks(publish, 2, DDP, changes, request.param)


def test_every_rank_is_told_the_same_of_every_logged_step(told):
    (one, _), (other, _) = told
    assert [report.step for report in one] == [report.step for report in other]
    assert [report.step for report in one if report.published] == [2, 4, 5]
    assert repr([without_clock(report) for report in one]) == repr(
        [without_clock(report) for report in other]
    )


def test_values_are_those_of_all_ranks_and_of_all_steps_since_the_last_logged_one(told):
    """Of steps 3 and 4, with 30, 31 and 40, 41 on the two ranks."""
    report = next(report for report in told[0][0] if report.step == 4 and report.published)
    expected = {"sum": 142.0, "mean": 35.5, "max": 41.0, "min": 30.0, "last": 41.0}
    for reduce, value in expected.items():
        assert report.values[f"{reduce}/host"] == report.values[f"{reduce}/device"] == value
        assert math.isnan(report.values[f"{reduce}/nan"]), reduce
        for rank in range(2):
            assert report.values[f"{reduce}/of.rank.{rank}"] == (2.0 if reduce == "sum" else 1.0)
    assert report.values["max/late"] == -7.0
    assert report.values["weighted"] == (1 * 1 + 2 * 3) / 4
    spread = report.histograms["spread"]
    assert (spread.edges, spread.counts) == ((-1.0, 0.0, 1.0), (4.0, 8.0))
    assert (spread.below, spread.above, spread.nan) == (4.0, 8.0, 4.0)
    assert report.texts == {"said": "by rank 1"}
    each = [report.values[f"each/{over}"] for over in ("max", "mean", "median", "rank")]
    assert each == [35.0, 34.5, 34.0, 0.0]
    assert math.isnan(report.values["one/max"])
    assert report.values["one/rank"] == 1.0
    assert report.metrics["sum/host"].reduce == "sum"
    assert report.metrics["loss"].unit == "nats"
    assert {"loss", "grad_norm", "losses/lm"} <= report.values.keys() - report.published
    last = next(report for report in told[0][0] if report.step == 5)
    assert "one/max" not in last.values
    assert "max/late" not in last.values
    assert not last.texts


def test_what_some_ranks_say_is_not_told_as_if_it_were_of_all(told):
    """Rank 0 says nothing in steps 3 and 4, of which step 4 tells."""
    found = {report.step: report.values for report in told[0][0] if report.published}
    names = [f"some/{over}" for over in ("max", "mean", "median", "rank")]
    assert [[found[step].get(name) for name in names] for step in (2, 4, 5)] == [
        [2.0, 1.5, 1.0, 1.0],
        [None] * 4,
        [2.0, 1.5, 1.0, 1.0],
    ]
    assert found[4]["one/rank"] == 1.0  # no other rank ever said anything


@pytest.mark.full
def test_publishing_sends_nothing_more_but_in_a_step_with_new_names():
    """All monitors share the two all-reduces of a logged step; steps 1 and 3 bring names, and are reduced
    anew."""
    options = {"check_collectives": True}  # through the process group, where they are seen
    changes = {"run": {"steps": 5}}
    with_names = run_ranks(publish, 2, DDP, changes, False, **options)[0][1]
    without = run_ranks(publish, 2, DDP, changes, False, Monitor, **options)[0][1]
    more = Counter(with_names) - Counter(without)
    # Sizes, then names; and at the end what was published after the last logged step.
    assert more == {"allreduce_.default": 2 * 2 + 2, "allgather_.default": 2 * 2}


class Undeclared(Monitor):
    declared = (metric("update/ratio"),)

    def on_start(self, run):
        self.metrics = run.metrics

    def on_before_update(self, update):
        self.metrics.scalar("update/ration", 1.0, unit="m", reduce="sum")

    def on_metrics(self, report):
        self.report = report


@pytest.mark.parametrize("strict", [False, True])
def test_an_undeclared_name_is_a_warning_and_told_or_an_error_in_a_strict_run(strict):
    engine = make_engine(DDP.alone(), {"run": {"strict_monitors": strict}}, callbacks=[Undeclared()])
    text = "publishes the metric 'update/ration', which it does not declare (did you mean 'update/ratio'?)"
    if strict:
        with pytest.raises(
            PluginError, match=text.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
        ):
            engine.fit()
        return
    with capture_logs() as logs:
        engine.fit()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [f"Undeclared {text}"]
    report = engine.run.monitors[-1].report
    assert report.values["update/ration"] == 1.0
    assert (report.metrics["update/ration"].unit, report.metrics["update/ration"].reduce) == ("m", "sum")


@pytest.mark.parametrize(
    ("publish", "text"),
    [
        (lambda metrics: metrics.scalar("loss", 1.0), "the metric 'loss' is the core's"),
        (lambda metrics: metrics.scalar("sum/x", 1.0, reduce="max"), "it is a scalar, sum, in '1'"),
        (lambda metrics: metrics.scalar("spread", 1.0), "it is a histogram"),
        (lambda metrics: metrics.scalar("sum/x", torch.ones(2)), "has 2 values; expected one number"),
        (lambda metrics: metrics.scalar("sum/a b", 1.0), "'sum/a b' is no metric's name"),
        (
            lambda metrics: metrics.statistics("x/{statistic}", torch.ones(2), of=["rms", "nonfinite"]),
            "nonfinite counts each element once",
        ),
    ],
)
def test_what_cannot_be_published_is_told(publish, text):
    class Wrong(Publishes):
        def on_before_update(self, update):
            publish(self.metrics)

    with pytest.raises(PluginError, match=text):
        make_engine(DDP.alone(), {}, callbacks=[Wrong()]).fit()


def test_a_name_has_one_owner():
    with pytest.raises(PluginError, match="'sum/host' is published by two monitors"):
        make_engine(DDP.alone(), {}, callbacks=[Publishes(), Publishes()]).fit()


class Alternates(Publishes):
    """Publishes one name in odd steps or in even ones."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd

    def on_before_update(self, update):
        if update.step % 2 == self.odd:
            self.metrics.scalar("sum/host", 1.0)


def test_a_name_has_one_owner_in_other_steps_too():
    with pytest.raises(PluginError, match="'sum/host' is published by two monitors"):
        make_engine(DDP.alone(), {"run": {"steps": 2}}, callbacks=[Alternates(1), Alternates(0)]).fit()


class OnOneRank(Monitor):
    """Publishes a name on one rank each, as other kinds, in steps before either rank has learned of it."""

    def on_start(self, run):
        self.run = run

    def on_before_update(self, update):
        self.run.metrics.scalar("b", 5.0, reduce="max")
        if update.step == 1 + self.run.rank:
            self.run.metrics.scalar("alone", 1.0, reduce="max" if self.run.rank else "mean")


def refused():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", True)
        engine = make_engine(DDP, {"run": {"steps": 4, "strict_monitors": False}}, callbacks=[OnOneRank()])
        with pytest.raises(PluginError) as caught:
            engine.fit()
    return str(caught.value)


def test_ranks_that_publish_a_name_differently_in_other_steps_are_all_told():
    for text in run_ranks(refused, 2):
        assert text.startswith("ranks publish the metric 'alone' differently")


@pytest.fixture
def gather():
    """Return a function that returns sums and maxima of one rank's values of one name."""

    def gathered(publish, device="cpu", **options):
        device = torch.device(device)
        spec = Spec("x", 0, metric("x", **options))
        found = Gathered(spec, device)
        publish(found)
        if device.type == "meta":
            return found
        sums = pack(Table([spec]), {"x": found}, device, [], []).tolist()
        return dict(spec.read(sums[: spec.width], sums[spec.width])).get("x")

    return gathered


def test_a_mean_is_computed_in_float64_and_a_weight_of_0_counts_nothing(gather):
    def publish(found):
        for value, weight in ((3.0, 32768), (5.0, 32768), (math.nan, 0), (math.inf, 0)):
            found.scalar(torch.tensor(value, dtype=torch.float16), weight)
            found.scalar(torch.tensor(value, dtype=torch.float16), torch.tensor(weight))
            found.scalar(value, weight)

    assert gather(publish, reduce="mean") == 4.0


@pytest.mark.parametrize(
    ("reduce", "value"), [("sum", 10.0), ("mean", 2.5), ("max", 4.0), ("min", 1.0), ("last", 4.0)]
)
def test_a_published_tensor_may_be_changed_afterwards(gather, reduce, value):
    def publish(found):
        counter, weight = torch.zeros(()), torch.ones(1)
        for _ in range(4):
            counter += 1
            found.scalar(counter, weight)
        counter += 100
        weight += 100

    assert gather(publish, reduce=reduce) == value


@pytest.mark.parametrize(
    ("reduce", "value"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)]
)
@pytest.mark.parametrize("tensors", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_numbers_and_tensors_of_one_name_count_alike_once_it_has_a_position(reduce, value, tensors):
    reducer = MetricReducer(
        Mesh(Layout({"dense": View(("dp",), (1,))})), {"one": [metric("x", reduce=reduce)]}
    )
    metrics = Metrics(reducer, 0, "one", strict=True)
    for step in (1, 2, 3):  # from the second on it has a position
        for number, each in enumerate((1.0, 3.0, 2.0)):
            metrics.scalar("x", torch.tensor(each) if number in tensors else each)
        (report,) = reducer.logged(step, {})
        assert report.values == {"x": value}
    for each in (math.nan, 1.0):
        metrics.scalar("x", each)
    (report,) = reducer.logged(4, {})
    assert math.isnan(report.values["x"]) == (reduce != "last")
    assert reducer.logged(5, {})[0].values == {}


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_numbers_of_a_step_under_way_stay_when_another_name_gets_a_position(reduce, monkeypatch):
    """As on a device, where a step is read after the next one has published."""
    monkeypatch.setattr(Mesh, "device_is_async", True)
    declared = [metric("{name}", reduce=reduce), metric("first", reduce="max")]
    reducer = MetricReducer(Mesh(Layout({"dense": View(("dp",), (1,))})), {"one": declared})
    metrics = Metrics(reducer, 0, "one", strict=True)
    metrics.scalar("x", 1.0)
    reducer.logged(1, {})
    metrics.scalar("first", 9.0)
    assert [report.values for report in reducer.logged(2, {})] == [{"x": 1.0}]
    metrics.scalar("x", 7.0)  # at its position, before the table has one for the other name
    assert [report.values for report in reducer.rest()] == [{"first": 9.0}]
    reducer.logged(3, {})
    assert [report.values for report in reducer.rest()] == [{"x": 7.0}]


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_a_number_on_the_host_joins_those_of_the_device(gather, reduce):
    """``meta`` stands for a device here: tensors of it and of the host cannot be stacked."""

    def publish(found):
        for device in ["cpu", "meta"] * MOST_WAITING:
            found.scalar(torch.ones(1, device=device), torch.ones((), device="cpu"))

    found = gather(publish, device="meta", reduce=reduce)
    waiting = [*found.unread.most, *(each for some in found.unread.sums.values() for each in some)]
    assert 0 < len(waiting) <= 2 * MOST_WAITING
    assert {(each.device.type, each.dtype) for each in waiting} == {("meta", torch.float64)}


def test_jsonl_keeps_all_that_is_published_in_rows_of_their_own(tmp_path):
    changes = {"run": {"steps": 3}, "monitor": [{"use": "jsonl"}]}
    told, _ = publish(DDP.alone(), changes, False, folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["event"] == "metrics"]
    assert [row["step"] for row in found] == [1, 2, 3]
    for row, report in zip(found, [report for report in told if report.published], strict=True):
        published = {name: value for name, value in report.values.items() if name in report.published}
        assert repr({name: float(value) for name, value in row["values"].items()}) == repr(published)
        assert tuple(row["histograms"]["spread"]["counts"]) == report.histograms["spread"].counts


def test_console_shows_the_published_metrics_that_are_asked_for(capsys):
    # The pattern fits validation/loss too, of the core: the monitor that publishes is in no recipe.
    case = Case("monitor", use="console", config={"metrics": ["[mv]a[xl]*/*", "loss"]})
    case = attrs.evolve(case, config={**case.config, "every": 2})
    publish(case, {"run": {"steps": 3}}, False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "max/host" in line]
    assert [line.split()[0] for line in lines] == ["step=2", "step=3"]  # the last step too
    assert lines[0] == "step=2 max/device=20 max/host=20 max/nan=1 max/of.rank.0=1"
