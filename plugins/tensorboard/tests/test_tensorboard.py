"""What TensorBoard reads back is what was published."""

import math
import sys

import attrs
import nanotrain_tensorboard
import numpy as np
import pytest
from nanotrain_tensorboard import TensorBoardConfig
from nanotrain_tensorboard.events import SEAM, TensorBoard, buckets
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from nanotrain_core.api.torch import EndReport, Histogram, MetricsReport, Monitor, Rollback
from nanotrain_core.errors import RecipeError
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

CASE = Case("monitor", use="tensorboard")


def read(folder):
    found = EventAccumulator(
        str(folder), size_guidance=dict.fromkeys(("tensors", "scalars", "histograms"), 0)
    )
    return found.Reload()


def curve(found, name):
    return [(event.step, event.value) for event in found.Scalars(name)]


def text(found, name):
    return [
        (event.step, make_ndarray(event.tensor_proto).item().decode())
        for event in found.Tensors(f"{name}/text_summary")
    ]


class Told(Monitor):
    """Keeps what sinks are told, and goes back from step 4 once if asked to."""

    def __init__(self, *, back=False):
        self.reports, self.back = [], back

    def on_metrics(self, report):
        self.reports.append(report)
        if self.back and report.step == 4:
            self.back = False
            return Rollback(onset=4, reason="a spike")
        return None

    def on_rollback(self, report):
        self.reports = [each for each in self.reports if each.step <= report.restored]


def train(folder, *, steps=3, **options):
    told = Told(back=options.pop("back", False))
    changes = {
        "run": {"steps": steps},
        "checkpoint": {"use": "simple", "every": 2, "keep": 9},
        "evaluation": {"every": 2, "sequences": 4},
        "optimizer": {"use": "sgd", "lr_schedule": {"use": "constant"}},
    }
    engine = make_engine(CASE, changes, callbacks=[told], folder=folder, **options)
    engine.fit()
    return told.reports


def expected(reports):
    curves = {}
    for report in reports:
        for name, value in report.values.items():
            curves.setdefault(name, {})[report.step] = float(np.float32(value))
    return {name: sorted(points.items()) for name, points in curves.items()}


def test_every_curve_of_a_run_that_was_rolled_back_and_resumed_is_as_it_was_published(tmp_path):
    first = train(tmp_path, steps=5, back=True)
    second = train(tmp_path, steps=7, resume="4")  # of 5 steps: the last is taken again
    found = read(tmp_path / "tensorboard")
    reports = [each for each in first if each.step <= 4] + second
    wanted = expected(reports)
    assert {"loss", "validation/loss", "checkpoint/seconds"} <= {*wanted} == {*found.Tags()["scalars"]}
    for name in wanted:
        points = curve(found, name)
        assert len(points) == len({*points})
        assert sorted(points) == wanted[name], name
    assert text(found, SEAM) == [
        (3, "rolled back from step 4 to step 2: a spike"),
        (5, "resumed after step 4"),
    ]


@pytest.fixture
def sink(tmp_path):
    """Return a sink that writes at once, in the calling thread."""

    class Info:
        rank, first_step, folder = 0, 0, tmp_path
        recipe = TensorBoardConfig()

    def begin(**changes):
        made = TensorBoard(TensorBoardConfig(**changes))
        made.open(Info())
        return made

    return begin


HISTOGRAM = Histogram((-1.0, 0.0, 1.0, 3.0), (2.0, 0.0, 4.0), 1.0, 5.0, 3.0)


def test_histograms_texts_and_numbers_that_are_not_finite_come_back(sink, tmp_path):
    writer = sink()
    values = {"a/b.c-d": math.nan, "inf": -math.inf, "big": 1e12}
    writer.write(MetricsReport(7, values, {"h": HISTOGRAM}, {"health": "**good**: all is well"}))
    writer.finish(EndReport(7, "done", 8))
    found = read(tmp_path / "tensorboard")
    got = {name: curve(found, name) for name in found.Tags()["scalars"]}
    assert repr(got) == repr(
        {
            "a/b.c-d": [(7, math.nan)],
            "inf": [(7, -math.inf)],
            "big": [(7, float(np.float32(1e12)))],
            "h/nan": [(7, 3.0)],
        }
    )
    (event,) = found.Histograms("h")
    kept = event.histogram_value
    assert (event.step, [*kept.bucket_limit]) == (7, [-1.0, 0.0, 1.0, 3.0, sys.float_info.max])
    assert [*kept.bucket] == [1.0, 2.0, 0.0, 4.0, 5.0]
    assert (kept.num, kept.min, kept.max) == (12.0, -1.0, 3.0)
    assert text(found, "health") == [(7, "**good**: all is well")]


def test_a_histogram_without_outliers_has_its_own_bins_alone():
    got = buckets(attrs.evolve(HISTOGRAM, below=0.0, above=0.0))
    assert (got.bucket_limits, got.bucket_counts) == ([0.0, 1.0, 3.0], [2.0, 0.0, 4.0])
    assert (got.sum, got.sum_squares) == (-0.5 * 2 + 2.0 * 4, 0.25 * 2 + 4.0 * 4)


def test_only_the_metrics_that_are_asked_for_are_written(sink, tmp_path):
    writer = sink(metrics=["validation/*"], histograms=False, folder=str(tmp_path / "other"))
    writer.write(MetricsReport(1, {"loss": 1.0, "validation/loss": 2.0}, {"validation/h": HISTOGRAM}))
    writer.finish(EndReport(7, "done", 8))
    tags = read(tmp_path / "other").Tags()
    assert (tags["scalars"], tags["histograms"]) == (["validation/loss"], [])


def test_settings_are_hyperparameters(tmp_path):
    train(tmp_path, steps=1)
    found = read(tmp_path / "tensorboard")
    assert "_hparams_/session_start_info" in found.summary_metadata
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in content
    assert "| `run.steps` | 1 |" in text(found, "run/recipe")[0][1]


def test_a_file_in_place_of_its_folder_is_refused(tmp_path):
    """The run went on without what it was told to write."""
    (tmp_path / "events").write_text("")
    Case("monitor", use="tensorboard", config={"folder": str(tmp_path / "new")}).recipe()
    with pytest.raises(RecipeError, match=r"monitor\.0\.folder: .*events is a file; expected a folder"):
        Case("monitor", use="tensorboard", config={"folder": str(tmp_path / "events")}).recipe()


def test_a_run_is_refused_where_the_library_is_missing(monkeypatch):
    def missing(name):
        raise nanotrain_tensorboard.PackageNotFoundError(name)

    monkeypatch.setattr(nanotrain_tensorboard, "version", missing)
    with pytest.raises(RecipeError, match=r"monitor.0.use: .*pip install tensorboard"):
        CASE.recipe()
