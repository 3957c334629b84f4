"""Slow ranks, slow data and growing memory are said where all else is that is wrong: in the texts of health.

The other planted troubles are in plugins/health/tests. Sleeps are long, so that a busy machine says nothing.
"""

import mmap
import time

import pytest
import torch

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


def slow_data(engine):
    take = engine.run.feed.data.train_batch
    engine.run.feed.data.train_batch = lambda *args: (time.sleep(0.2), take(*args))[1]


def slow_rank(engine):
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_pre_hook(lambda *_: time.sleep(0.2))


def fresh(size):
    """Return a tensor of memory that no allocator had before: each page of it is new to the process."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def keeps_tensors(engine):
    kept = []
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_hook(lambda *_: kept.append(fresh(2**22)))  # twice a step


def nothing(engine):
    pass


def sentences(plant):
    said = Said()
    monitors = [{"use": use} for use in USED]
    engine = make_engine(DP, {"run": {"steps": 20}, "monitor": monitors}, callbacks=[said])
    plant(engine)
    engine.fit()
    return said.sentences


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (slow_data, "the run is input-bound"),
        (slow_rank, "rank 1 is slow: others wait for its compute"),
        (keeps_tensors, "host memory grows with every step"),
    ],
    ids=["slow-data", "slow-rank", "growing-memory"],
)
def test_a_trouble_of_the_machine_is_said_within_20_steps(plant, says):
    first, second = run_ranks(sentences, 2, plant)
    assert first == second
    assert any(says in sentence for sentence in first), first


@pytest.mark.full
def test_memory_that_grows_names_its_rank_and_a_healthy_run_says_none():
    found = run_ranks(sentences, 2, keeps_tensors)[0]
    (said,) = [sentence for sentence in found if "host memory grows" in sentence]
    assert "most on rank 1" in said
    for sentence in run_ranks(sentences, 2, nothing)[0]:
        assert any(words in sentence for words in OF_THE_MACHINE), sentence
