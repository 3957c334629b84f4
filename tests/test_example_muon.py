"""The example ``muon``: an optimizer that knows roles, sharded by ``zero12``, which it knows nothing of."""

import pytest
from examples_of_plugins import ALIBI, TP, example
from test_docs import failed

from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_engine


def roles(case):
    run = make_engine(case, {}).run
    return {
        placed.placement.name: placed.placement.role and placed.placement.role.name for placed in run.placed
    }


def test_placements_say_the_roles_of_parameters_on_every_layout():
    alone = roles(example("model", "alibi", config=ALIBI))
    assert alone["embed.weight"] == "VOCAB"
    assert alone["head.weight"] == "HEAD"
    assert alone["layers.0.q.weight"] == "COLUMN"
    assert alone["layers.1.norm_1.weight"] == "NORM"
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=TP)
    assert run_ranks(roles, 2, case) == [alone, alone]


def blocks_of_state(case):
    """Return (name, elements) of each tensor of the optimizer's state on this rank, after a step."""
    engine = make_engine(case, {"run": {"steps": 1}})
    engine.fit()
    return [(block.name, block.tensor.numel()) for block in engine.run.optimizer.blocks()]


def elements(found, slot):
    return sum(count for name, count in found if name.startswith(f"{slot}/"))


def test_embeddings_and_head_have_moments_and_matrices_a_momentum():
    (found,) = run_ranks(blocks_of_state, 1, example("optimizer", "muon"))
    slots = {name.partition("/")[2]: name.partition("/")[0] for name, _ in found}
    assert slots["embed.weight"] == slots["head.weight"] == slots["norm.weight"] == "exp_avg_sq"
    assert slots["layers.0.attn.q.weight"] == slots["layers.1.ffn.down.weight"] == "momentum"


def test_zero12_shards_the_state_of_an_optimizer_that_knows_nothing_of_it():
    sharded = example("optimizer", "muon", topology={"dp": 2}, overrides={"parallel": [{"use": "zero12"}]})
    (whole,) = run_ranks(blocks_of_state, 1, example("optimizer", "muon"))
    for slot in ("momentum", "exp_avg"):
        halves = [elements(found, slot) for found in run_ranks(blocks_of_state, 2, sharded)]
        assert sum(halves) == elements(whole, slot)
        assert max(halves) < 0.6 * sum(halves)


@pytest.mark.parametrize(
    ("topology", "wrappers"),
    [
        ({"dp": 2}, [{"use": "zero12"}]),
        pytest.param({"dp": 2}, [{"use": "zero12", "stage": 2, "bucket_mb": 0.01}], marks=pytest.mark.full),
        pytest.param({"tp": 2}, [{"use": "tp"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, [{"use": "tp"}, {"use": "zero12"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "pp": 2}, [{"use": "zero12"}], marks=pytest.mark.full),
    ],
    ids=["zero1", "zero2", "tp", "tp x zero1", "pp x zero1"],
)
def test_muon_gives_every_layout_the_weights_of_one_process(topology, wrappers):
    around = {"parallel": wrappers, **({"schedule": {"use": "1f1b"}} if "pp" in topology else {})}
    case = example("optimizer", "muon", config={"lr": 0.02}, topology=topology, overrides=around)
    assert failed(case, "layout_changes_nothing") == {}


@pytest.mark.full
@pytest.mark.parametrize("topology", [{}, {"dp": 2}], ids=["alone", "zero1"])
def test_muon_passes_every_check(topology):
    around = {"parallel": [{"use": "zero12"}]} if topology else {}
    assert failed(example("optimizer", "muon", topology=topology, overrides=around)) == {}
