"""What is over several logged steps, of experts and of the fixed batch is what its definition says."""

import hashlib

import pytest
from definitions import matching
from health_runs import Told
from series import CASE, KNOWN, PROBED, SERIES, SKIPPED, STEPS, History, plant

from nanotrain_core.testing.probe import make_engine

#: Names that a step has only from one on, or now and then.
FROM = {
    "loss/spike": 2,
    "data/drift": 2,
    "gradients/clip_rate": STEPS - 2,
    "gradients/clip_mean": STEPS - 2,
    "optimizer/skip_rate": KNOWN,
    "moe/balance/{router}": KNOWN,
    "moe/starved/{router}": KNOWN,
    "probes/kl": 2 * PROBED,
}


@pytest.fixture(scope="module")
def run():
    told = Told()
    engine = make_engine(CASE, {}, callbacks=[told])
    history = History(engine)
    engine.events.monitors = [*engine.events.monitors, history]
    plant(engine)
    engine.fit()
    assert {n for n in range(1, STEPS + 1) if history.skipped(n)} == SKIPPED
    steps = [report for report in told.reports if "loss" in report.values]
    return steps, history, [report for report in told.reports if "validation/gap" in report.values]


@pytest.mark.parametrize("metric", SERIES)
def test_what_is_told_of_many_steps_is_what_the_definition_says(run, metric):
    steps, history, evaluations = run
    found = [(r, *each) for r in [*steps, *evaluations] for each in matching(metric, r.values)]
    steps = [report.step for report, *_ in found]
    assert steps
    assert min(steps) >= FROM.get(metric, 1)
    for report, name, words in found:
        expected = SERIES[metric](history, report.step, **words)
        assert report.values[name] == pytest.approx(float(expected), rel=1e-7, abs=1e-9), (name, report.step)


def test_each_name_is_told_from_the_step_in_which_it_is_known(run):
    reports, *_ = run
    for metric, first in FROM.items():
        assert any(matching(metric, reports[first - 1].values)), metric


def test_histograms_of_loads_and_the_hash_of_the_batch(run):
    reports, history, _ = run
    for report, loads in zip(reports, history.loads, strict=True):
        wanted = {f"moe/load/{name}": tuple(load) for name, load in loads.items()}
        found = {name: each.counts for name, each in report.histograms.items()}
        doubled = report.step & (report.step - 1) == 0  # 1, 2, 4, 8, ...: intervals double, up to 50 steps
        assert found == (wanted if doubled or report.step == STEPS else {})
    digest = hashlib.sha256(history.batch.tokens.numpy().tobytes()).hexdigest()
    assert reports[PROBED - 1].texts["probes/batch"] == digest[:16]
