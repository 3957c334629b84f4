"""What the performance monitors tell of DeepSeek-V3 over pp, tp, ep and dp equals definitions written apart.

So it does in one process. What does not depend on the layout is as it is there: the FLOPs of a token, and the
tokens of a step.
"""

import statistics

import pytest
from compositions import MODELS, VOCAB
from definitions import matching
from measured import MEASURED
from noted import EVALUATE_EVERY, LENGTH, SAVE_EVERY, SEQUENCES, STEPS, earlier_attempt, seen

from nanotrain_core.testing import Case, run_ranks

CASE = Case(
    "schedule",
    use="1f1b",
    topology={"pp": 2, "tp": 2, "dp": 2, "ep": 2},
    overrides={
        "parallel": [{"use": "tp", "sequence_parallel": True}, {"use": "ep_deepseek"}, {"use": "ddp"}],
        "model": {**MODELS["deepseek_v3"], "layers": 4},
        "data": {"vocab": VOCAB},
        "evaluation": {"every": EVALUATE_EVERY, "sequences": 8},
        "batch": {"sequences": SEQUENCES, "microbatch": 1, "length": LENGTH},
        "optimizer": {"use": "adamw"},
    },
)
#: What AdamW counts beside its moments, and what the system holds of a process.
COUNTERS, SYSTEM = 1e-3, 0.2
#: Of what is read by clocks of its own, or some microseconds later: the core's pace, the ledger, the date.
CLOCKS = 0.2
TOLERANCES = {
    "seconds": CLOCKS,
    "tokens_per_second": CLOCKS,
    "memory/optimizer/{over}": COUNTERS,
    "memory/activations/{over}": COUNTERS,
    "memory/host/{over}": SYSTEM,
    "goodput": CLOCKS,
    "lost/{part}": CLOCKS,
    "checkpoint/age": CLOCKS,
}
#: What one rank has not: stages, and others to compare with.
OF_MANY = {"bubble", "pipeline/bubble/measured/{stage}", "pipeline/bubble/ideal/{stage}"} | {
    "pipeline/work/{over}",
    "pipeline/skew",
}


def trained(ranks, case, folder):
    return run_ranks(seen, ranks, case, folder, earlier_attempt(folder), timeout=120)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return trained(8, CASE, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(1, CASE.alone(), tmp_path_factory.mktemp("alone"))


def assert_as_defined(metric, ranks):
    found = list(matching(metric, ranks[0].values))
    assert found
    for name, words in found:
        expected = MEASURED[metric](ranks, **words)
        tolerance = 0.0 if name.endswith("/rank") else TOLERANCES.get(metric, 1e-6)
        assert ranks[0].values[name] == pytest.approx(expected, rel=tolerance, abs=tolerance / 100), name


@pytest.mark.full
@pytest.mark.parametrize("metric", MEASURED)
def test_on_eight_ranks_a_metric_is_what_its_definition_says(ranks, metric):
    assert_as_defined(metric, ranks)


@pytest.mark.full_cases("checkpoint/age")
@pytest.mark.parametrize("metric", sorted(MEASURED.keys() - OF_MANY))
def test_in_one_process_a_metric_is_what_its_definition_says(alone, metric):
    assert_as_defined(metric, alone)


@pytest.mark.full  # tests/test_metrics.py has the core's own
def test_every_rank_is_told_the_same(ranks):
    by_its_own_clock = {"seconds", "tokens_per_second", "checkpoint/seconds", "checkpoint/blocked"}
    for rank in ranks:
        told = [{n: v for n, v in r.values.items() if n not in by_its_own_clock} for r in (rank, ranks[0])]
        assert told[0] == told[1]


@pytest.mark.full
def test_every_rank_is_told_the_memory_of_each(ranks):
    for rank in ranks:
        (step, held, values), (later, *_) = rank.held
        assert (step, later, len(held)) == (1, 11, 8)
        assert max(held) == values["memory/allocated_peak/max"]
        assert held.index(max(held)) == values["memory/allocated_peak/rank"]
        assert statistics.fmean(held) == pytest.approx(values["memory/allocated_peak/mean"])


@pytest.mark.full
def test_stages_hold_other_sizes(ranks):
    """The definitions of memory would not notice ranks that are mixed up otherwise."""
    for what in ("weights", "gradients", "optimizer"):
        assert len({rank.bytes[what] for rank in ranks}) > 1


@pytest.mark.full
def test_a_token_has_the_flops_and_a_step_the_tokens_that_they_have_in_one_process(ranks, alone):
    for rank in ranks:
        assert rank.flops_per_token == alone[0].flops_per_token > 0
        assert rank.reports[0].tokens == alone[0].reports[0].tokens == SEQUENCES * LENGTH


@pytest.mark.full
def test_the_parts_of_a_step_add_up_to_its_time(ranks):
    values = ranks[0].values
    parts = ("forward_backward", "optimizer", "exposed_communication", "pipeline_wait", "monitors")
    total = sum(values[f"time/{part}"] for part in parts)
    assert total == pytest.approx(statistics.fmean(rank.reports[-1].seconds for rank in ranks), rel=0.1)
    assert values["time/exposed_communication"] > 0


@pytest.mark.full
def test_the_measured_bubble_is_a_share_and_near_the_executors(ranks):
    measured = [ranks[0].values[f"pipeline/bubble/measured/rank-{stage}"] for stage in range(2)]
    assert all(0 < share < 1 for share in measured)
    assert statistics.fmean(measured) == pytest.approx(ranks[0].values["bubble"], rel=0.3)


def test_shares_of_the_hours_add_up_to_all_of_them(alone):
    """Of an attempt that was lost, of a gap and of this attempt."""
    values = alone[0].values
    assert values["goodput"] + sum(
        values[name] for name in values if name.startswith("lost/")
    ) == pytest.approx(1)


def test_an_evaluation_and_a_save_are_told_in_the_step_after_them(alone):
    """There is an evaluation at the start, too; the save is that of step 7."""
    evaluated = {n for n, values in enumerate(alone[0].told, start=1) if values["time/evaluation"]}
    saving = {n: values["time/checkpoint"] for n, values in enumerate(alone[0].told, start=1)}
    assert evaluated == set(range(1, STEPS + 1, EVALUATE_EVERY))
    assert max(saving, key=saving.get) == SAVE_EVERY + 1
