"""What the performance monitors tell of DeepSeek-V3 over pp, tp, ep and dp equals definitions written apart.

As in one process is what does not depend on the layout: the FLOPs of a token, and the tokens of a step.
"""

import statistics
import time

import attrs
import pytest
from compositions import MODELS, VOCAB

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

PEAK = 0.5
USED = [
    {"use": "throughput", "peak_tflops": PEAK},
    {"use": "memory"},
    {"use": "pipeline"},
    {"use": "goodput"},
    {"use": "stragglers", "every": 1},
]
CASE = Case(
    "schedule",
    use="1f1b",
    topology={"pp": 2, "tp": 2, "dp": 2, "ep": 2},
    overrides={
        "parallel": [{"use": "tp", "sequence_parallel": True}, {"use": "ep_deepseek"}, {"use": "ddp"}],
        "model": {**MODELS["deepseek_v3"], "layers": 4},
        "data": {"vocab": VOCAB},
        "evaluation": {"every": 3, "sequences": 8},
        "batch": {"sequences": 8, "microbatch": 1},
        "optimizer": {"use": "adamw"},
    },
)
STEPS = 9


@attrs.define
class Seen:
    """What one rank saw."""

    values: dict
    """Told of the last step."""
    reports: list
    bytes: dict
    flops_per_token: float
    stage: int
    ranks: list
    """Of each report that has every rank's memory: it, and the other values."""
    told: list
    """Of each logged step, its values."""
    evaluations: list
    """Seconds of each, by a clock around it."""


class Keeps(Monitor):
    """Counts by itself what the others tell."""

    reads_weights = False

    def __init__(self):
        self.reports, self.values, self.ranks, self.told = [], {}, [], []

    def on_start(self, run):
        self.run = run

    def on_before_update(self, update):
        gradients = {each.name: each.tensor.numel() * each.tensor.itemsize for each in update.gradients()}
        weights = [placed.parameter for placed in self.run.placed]
        buffers = [each for part in self.run.parts for each in part.buffers()]
        self.bytes = {
            "gradients": sum(gradients.values()),
            "weights": sum(each.numel() * each.itemsize for each in (*weights, *buffers)),
            "optimizer": sum(2 * weight.numel() * weight.itemsize for weight in weights),
        }

    def on_step(self, report):
        self.reports.append(report)

    def on_metrics(self, report):
        self.values.update(report.values)
        self.told += [report.values] if "loss" in report.values else []
        if "memory/ranks" in report.histograms:
            self.ranks.append((report.step, report.histograms["memory/ranks"].counts, report.values))


def seen(monitors, case=CASE, steps=STEPS):
    keeps = Keeps()
    engine = make_engine(case, {"run": {"steps": steps}, "monitor": monitors}, callbacks=[keeps])
    evaluate, evaluations = engine._evaluate, []

    def timed():
        began = time.perf_counter()
        evaluate()
        evaluations.append(time.perf_counter() - began)

    engine._evaluate = timed
    engine.fit()
    info = keeps.run
    stage = info.mesh.coordinate("pp")
    found = keeps.values, keeps.reports, keeps.bytes, info.flops_per_token, stage, keeps.ranks
    return Seen(*found, keeps.told, evaluations)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(seen, 8, USED, timeout=120)


def test_every_rank_is_told_the_same(ranks):
    for rank in ranks:
        told = [
            {n: v for n, v in r.values.items() if n not in ("seconds", "tokens_per_second")}
            for r in (rank, ranks[0])
        ]
        assert told[0] == told[1]


def test_a_run_has_the_same_bits_with_and_without_them(ranks):
    """Random streams and weights too: conformance tests of the plugin."""
    for rank, alone in zip(ranks, run_ranks(seen, 8, [], timeout=120), strict=True):
        found = [[(r.loss, r.grad_norm) for r in one.reports] for one in (rank, alone)]
        assert found[0] == found[1]


@pytest.mark.parametrize("what", ["weights", "gradients", "optimizer"])
def test_memory_is_split_as_ranks_hold_it(ranks, what):
    held = [rank.bytes[what] / 2**20 for rank in ranks]
    told = {over: ranks[0].values[f"memory/{what}/{over}"] for over in ("max", "mean", "median", "rank")}
    assert told["max"] == pytest.approx(max(held), rel=1e-3)  # AdamW counts its steps, for each parameter
    assert told["mean"] == pytest.approx(statistics.fmean(held), rel=1e-3)
    assert told["median"] == pytest.approx(statistics.median_low(held), rel=1e-3)
    assert told["rank"] == held.index(max(held))
    assert max(held) > min(held)  # stages differ: the test would not notice otherwise


def test_every_rank_is_told_the_memory_of_each(ranks):
    for rank in ranks:
        ((step, held, values),) = rank.ranks
        assert (step, len(held)) == (1, 8)
        assert max(held) == values["memory/host_peak/max"] == held[int(values["memory/host_peak/rank"])]
        assert statistics.fmean(held) == pytest.approx(values["memory/host_peak/mean"])


def test_speed_follows_from_the_steps_time(ranks):
    values, last = ranks[0].values, [rank.reports[-1] for rank in ranks]
    a_second = statistics.fmean(report.tokens_per_second for report in last)
    steps = statistics.fmean(1 / report.seconds for report in last)
    tflops = ranks[0].flops_per_token * a_second / 8 / 1e12
    expected = {
        "speed/tokens_per_second_per_device": a_second / 8,
        "speed/effective_tokens_per_second": 8 * 16 * steps,  # of 8 sequences of 16 tokens none is ignored
        "speed/steps_per_second": steps,
        "speed/samples_per_second": 8 * steps,
        "speed/tflops": tflops,
        "speed/mfu": tflops / PEAK,
        "speed/eta": 0.0,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_a_token_has_the_flops_and_a_step_the_tokens_that_they_have_in_one_process(ranks):
    (alone,) = run_ranks(seen, 1, USED, CASE.alone(), 1)
    for rank in ranks:
        assert rank.flops_per_token == alone.flops_per_token > 0
        assert rank.reports[0].tokens == alone.reports[0].tokens == 8 * 16


def test_the_parts_of_a_step_add_up_to_its_time(ranks):
    values = ranks[0].values
    parts = ("forward_backward", "optimizer", "exposed_communication", "pipeline_wait", "monitors")
    total = sum(values[f"time/{part}"] for part in parts)
    assert total == pytest.approx(statistics.fmean(rank.reports[-1].seconds for rank in ranks), rel=0.1)
    assert values["time/exposed_communication"] > 0
    assert values["time/exposed_fraction"] == pytest.approx(
        values["time/exposed_communication"] / total, rel=0.1
    )


def test_the_ideal_bubble_is_that_of_the_paper_and_the_measured_one_the_executors(ranks):
    """1F1B: (p - 1) / (m + p - 1); here m = 4 microbatches of each data rank on p = 2 stages."""
    values = ranks[0].values
    measured = [values[f"pipeline/bubble/measured/rank-{stage}"] for stage in range(2)]
    for stage in range(2):
        assert values[f"pipeline/bubble/ideal/rank-{stage}"] == pytest.approx(1 / 5)
        assert 0 < measured[stage] < 1
    assert statistics.fmean(measured) == pytest.approx(values["bubble"], rel=0.3)


def test_the_skew_is_the_slowest_ranks_work_over_the_medians(ranks):
    """Told with the logged step after the one whose work it is of: it is derived from what all ranks said."""
    told = [values for values in ranks[0].told if "pipeline/skew" in values]
    before = [values for values in ranks[0].told if "pipeline/work/max" in values]
    assert told
    for values, earlier in zip(told, before, strict=False):
        assert values["pipeline/skew"] == earlier["pipeline/work/max"] / earlier["pipeline/work/median"] >= 1
        assert earlier["pipeline/work/rank"] in range(8)


def test_an_evaluation_takes_what_its_slowest_rank_takes(ranks):
    """Of the start and of steps 3, 6 and 9: step 7 tells of the third."""
    slowest = max(rank.evaluations[2] for rank in ranks)
    found = {n: values["time/evaluation"] for n, values in enumerate(ranks[0].told, start=1)}
    assert found.pop(7) == pytest.approx(slowest, rel=0.5)
    assert {step for step, seconds in found.items() if seconds} == {1, 4}
    assert {values["time/checkpoint"] for values in ranks[0].told} == {0.0}
