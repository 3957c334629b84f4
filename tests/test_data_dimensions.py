"""Ranks read different sequences along all data dimensions of a topology, whatever their names."""

from pathlib import Path

import pytest

from nanotrain_core.errors import RecipeError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.recipe.replicas import replica_dims
from nanotrain_core.testing import Case, failures, trials
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import make_engine

HYBRID = Case(
    "topology",
    use="hybrid",
    config={"copies": 2},
    world_size=4,
    plugins=[Path(__file__).with_name("flat_topology.py")],
)


def sequences(case):
    """Return the sequences that this rank trains on in its first step."""
    batches = make_engine(case, {}).run.feed.microbatches()
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def test_each_sequence_is_read_by_one_rank():
    (alone,) = run_ranks(sequences, 1, HYBRID.alone())
    ranks = run_ranks(sequences, 4, HYBRID)
    assert [len(rows) for rows in ranks] == [2] * 4
    assert sorted(row for rows in ranks for row in rows) == sorted(alone)


@pytest.mark.full
def test_training_on_data_dimensions_of_any_name_equals_one_process():
    listed = [t for t in trials(HYBRID) if t.label == "a_run_on_it_equals_one_process"]
    assert listed
    assert not failures(listed)


def test_a_batch_that_leaves_ranks_without_a_sequence_is_told_with_all_data_dimensions():
    with pytest.raises(RecipeError, match="some of copies x shards = 4 ranks without a sequence"):
        HYBRID.recipe(batch={"sequences": 3, "microbatch": 1})


def test_ranks_that_share_a_sequence_read_the_same_rows():
    dense = View(("pp", "rep", "cp", "dp"), (2, 2, 2, 3))
    layout = Layout({"dense": dense}, data_dims=("dp", "cp", "rep"), sequence_dims=("cp",))
    assert layout.row_dims == ("rep", "dp")
    group = layout.ranks(0, *layout.row_dims)
    assert [layout.coordinate(rank, *layout.row_dims) for rank in group] == [*range(6)]
    assert Layout({"dense": View(("tp",), (4,))}).row_dims == ()


def test_which_dimensions_need_no_component_follows_from_the_topology():
    """Not from their names: those that divide rows, and what a second view's degrees leave."""
    recipe = HYBRID.recipe(optimizer={"use": "sgd"})
    dense = View(("copies", "shards", "cp"), (2, 2, 2))
    views = {"dense": dense, "expert": View(("rest", "tp"), (4, 2))}
    dims = ("copies", "shards", "cp", "rest", "tp")  # the recipe has a degree of tp
    layout = Layout(views, data_dims=dims, sequence_dims=("cp",))
    assert replica_dims(recipe, layout) == ("copies", "shards", "rest")


def test_data_dimensions_of_any_name_do_not_prevent_cuda_graphs():
    with pytest.raises(RecipeError) as refused:
        HYBRID.recipe(run={"cuda_graphs": True}, schedule={"use": "zb_h1"})
    assert "schedule 'zb_h1'" in str(refused.value)
    assert "topology.copies" not in str(refused.value)
