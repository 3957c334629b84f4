"""The example ``shampoo``: state of whole matrices, of which a rank may have several ranges, or none."""

import json
from collections import Counter
from pathlib import Path

import pytest
from examples_of_plugins import example
from test_docs import failed

from nanotrain_core.cli import main
from nanotrain_core.contracts import Monitor
from nanotrain_core.metrics.declared import Metric
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_engine

ZERO = [{"use": "zero12", "bucket_mb": 0.01}]


def statistics(case):
    """Return the most ranges of one matrix on this rank, and how many blocks each name has."""
    optimizer = make_engine(case, {}).run.optimizer
    most = max(Counter(shard.placement.name for shard in optimizer.behind.master_shards).values())
    names = Counter(block.name for block in optimizer.blocks())
    return most, {name: count for name, count in names.items() if name.startswith(("left/", "right/"))}


def test_a_rank_has_them_once_for_each_matrix_that_it_has_ranges_of():
    case = example("optimizer", "shampoo", topology={"dp": 2}, overrides={"parallel": ZERO})
    found = run_ranks(statistics, 2, case)
    assert max(most for most, _ in found) > 1
    for _, names in found:
        assert set(names.values()) == {1}
    everywhere = {name for _, names in found for name in names}
    assert {"left/layers.0.attn.k.weight", "right/layers.1.ffn.down.weight"} <= everywhere


@pytest.mark.parametrize(
    ("topology", "wrappers"),
    [
        ({"dp": 2}, ZERO),
        pytest.param({"tp": 2}, [{"use": "tp"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, [{"use": "tp"}, *ZERO], marks=pytest.mark.full),
        pytest.param({"dp": 2, "pp": 2}, ZERO, marks=pytest.mark.full),
    ],
    ids=["zero1", "tp", "tp x zero1", "pp x zero1"],
)
def test_every_layout_saves_and_trains_what_one_process_does(topology, wrappers):
    around = {"parallel": wrappers, **({"schedule": {"use": "1f1b"}} if "pp" in topology else {})}
    case = example("optimizer", "shampoo", config={"lr": 0.02}, topology=topology, overrides=around)
    assert failed(case, "state_has_a_place", "layout_changes_nothing", "resume_is_bit_equal") == {}


class Norms(Monitor):
    """Publishes the norms of one kind of the optimizer's state."""

    declared = (Metric(name="{statistic}/{parameter}", unit="1", group="state", summary="for a test"),)

    def on_start(self, run):
        self.run = run

    def on_after_update(self, update):
        state = self.run.optimizer_state("left")
        self.run.metrics.placed("{statistic}/{parameter}", state, ["norm"])

    def on_metrics(self, report):
        self.told = {name: report.values[name] for name in report.published}


def norms(case):
    monitor = Norms()
    make_engine(case, {"run": {"steps": 1}}, callbacks=[monitor]).fit()
    return monitor.told


@pytest.mark.parametrize(
    ("topology", "wrappers"),
    [
        ({"dp": 2}, ZERO),
        pytest.param({"tp": 2}, [{"use": "tp"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, [{"use": "tp"}, *ZERO], marks=pytest.mark.full),
    ],
    ids=["zero1", "tp", "tp x zero1"],
)
def test_monitors_count_state_of_a_whole_matrix_once(topology, wrappers):
    """Each rank that has a part of the matrix had measured all of L as if it were another part."""
    case = example("optimizer", "shampoo", topology=topology, overrides={"parallel": wrappers})
    (alone,) = run_ranks(norms, 1, case.alone())
    assert "norm/layers.0.attn.k.weight" in alone
    assert run_ranks(norms, case.world_size, case)[0] == pytest.approx(alone, rel=1e-9)


@pytest.mark.full
def test_a_plan_counts_the_exchange_of_ranges(capsys):
    """In a dry run no rank can be asked for its ranges: each is taken to hold as much as this one."""
    plugin = str(Path(__file__).parents[1] / "docs/examples/plugins/shampoo.py")
    words = ["parallel=[{use='zero12'}]", "optimizer={use='shampoo',lr=1e-3}", "run.ranks=2"]
    sets = [each for word in words for each in ("--set", word)]
    found = {}
    for use in ("shampoo", "sgd"):
        assert (
            main(["plan", "laptop", *sets, "--set", f"optimizer.use={use}", "--plugin", plugin, "--json"])
            == 0
        )
        exchanged = json.loads(capsys.readouterr().out)["collectives"]["of_a_step"]
        found[use] = sum(each["bytes"] for each in exchanged if each["op"] == "all_gather")
    assert found["shampoo"] > 1.5 * found["sgd"]  # weights, and gradients of matrices
