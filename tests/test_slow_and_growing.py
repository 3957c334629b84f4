"""Slow ranks, slow data and growing memory are said where all else is that is wrong: in the texts of health.

The other planted troubles are in plugins/health/tests, rules without sentences in plugins/performance/tests.
Sleeps are long, so that a busy machine says nothing.
"""

import pytest
from machine_troubles import growing_memory, nothing, slow_data, slow_rank

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

USED = ("health", "throughput", "memory", "pipeline", "stragglers")
DP = Case("monitor", use="health", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
#: What may be said of a machine that others use, too.
OF_THE_MACHINE = ("steps take over twice", "one rank computes", "is slow", "the host is almost")


class Said(Monitor):
    """Keeps the sentences of health, of all monitors."""

    def __init__(self):
        self.sentences = []

    def on_metrics(self, report):
        self.sentences += [text for name, text in report.texts.items() if name.startswith("health")]


def sentences(plant, amount):
    said = Said()
    monitors = [{"use": use} for use in USED]
    engine = make_engine(DP, {"run": {"steps": 20}, "monitor": monitors}, callbacks=[said])
    plant(engine, amount)
    engine.fit()
    return said.sentences


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "amount", "says"),
    [
        (slow_data, 0.2, "the run is input-bound"),
        (slow_rank, 0.2, "rank 1 is slow: others wait for its compute"),
        (growing_memory, 2**22, "host memory grows with every step"),
    ],
    ids=["slow-data", "slow-rank", "growing-memory"],
)
def test_a_trouble_of_the_machine_is_said_within_20_steps(plant, amount, says):
    first, second = run_ranks(sentences, 2, plant, amount)
    assert first == second
    assert any(says in sentence for sentence in first), first


@pytest.mark.full
def test_memory_that_grows_names_its_rank_and_a_healthy_run_says_none():
    found = run_ranks(sentences, 2, growing_memory, 2**22)[0]
    (said,) = [sentence for sentence in found if "host memory grows" in sentence]
    assert "most on rank 1" in said
    for sentence in run_ranks(sentences, 2, nothing, 0)[0]:
        assert any(words in sentence for words in OF_THE_MACHINE), sentence
