"""Layers are split as listed, or such that the slowest stage is as fast as can be."""

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig
from nanotrain_pp_1f1b.balance import balance
from nanotrain_pp_1f1b.components import DualPipeV, Interleaved, OneForwardOneBackward

from nanotrain_core.pipeline.actions import Costs, Part
from nanotrain_core.pipeline.simulator import Durations, simulate

#: In quarters of a layer, so that sums are exact.
ends = st.sampled_from([0, 1, 4, 6, 16])
layer = st.sampled_from([4, 6, 9])


def every_split(costs, stages):
    """Yield every way to give each stage a layer at least, unless it has an end of the model that costs."""
    empty = {0: costs.embedding > 0, stages - 1: costs.head > 0}
    count = len(costs.layers)
    for sizes in product(range(count + 1), repeat=stages):
        if sum(sizes) == count and all(size or empty.get(stage) for stage, size in enumerate(sizes)):
            yield sizes


def times(sizes, costs, ranks):
    """Return what the slowest stage, the slowest stage of each chunk, and the busiest rank have to do."""
    edges = [0, *accumulate(sizes)]
    stages = [sum(costs.layers[first:last]) for first, last in pairwise(edges)]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    pp = max(ranks) + 1
    chunks = tuple(max(stages[first : first + pp]) for first in range(0, len(stages), pp))
    loads = [sum(s for s, r in zip(stages, ranks, strict=True) if r == rank) for rank in set(ranks)]
    return max(stages), sum(chunks), sum(chunk**2 for chunk in chunks), chunks, max(loads)


def best_times(costs, ranks):
    return min(times(sizes, costs, ranks) for sizes in every_split(costs, len(ranks)))


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), ends, ends)
def test_no_split_has_a_faster_slowest_stage(data, stages, embedding, head):
    layers = data.draw(st.lists(layer, min_size=stages, max_size=stages + 5))
    costs = Costs(embedding=embedding, layers=tuple(layers), head=head)
    sizes = balance(costs, range(stages))
    assert tuple(sizes) in {*every_split(costs, stages)}
    assert times(sizes, costs, range(stages)) == best_times(costs, range(stages))


virtual = st.sampled_from([[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1, 0, 1]])


@settings(deadline=None)
@given(virtual, st.integers(0, 3), st.integers(6, 8), layer, ends, ends)
def test_of_these_none_has_faster_chunks_or_a_faster_busiest_rank(ranks, dense, count, moe, embedding, head):
    costs = Costs(embedding=embedding, layers=(4,) * dense + (moe,) * (count - dense), head=head)
    assert times(balance(costs, ranks), costs, ranks) == best_times(costs, ranks)


@pytest.mark.parametrize(
    ("layers", "head", "pp", "v", "expected"),
    [
        (80, 1.2, 8, 5, [2] * 38 + [3, 1]),
        (80, 2.2, 8, 5, [2] * 37 + [3, 3, 0]),  # both in the head's chunk, not one in another
        (48, 1.0, 4, 4, [3] * 14 + [4, 2]),
        (48, 1.0, 4, 6, [2] * 22 + [3, 1]),
    ],
)
def test_a_step_of_virtual_stages_is_shorter_than_with_as_many_layers_each(layers, head, pp, v, expected):
    """As with listed ``layers``, or Megatron's even split: simulated, where a head costs several layers."""
    costs = Costs(layers=(1.0,) * layers, head=head)

    def step(sizes):
        schedule = Interleaved(InterleavedConfig(v=v, layers=sizes))
        stages = [costs.of(part) for part in schedule.parts(costs, pp)]
        return simulate(schedule.actions(pp, 4 * pp), Durations(forward=stages, backward=stages)).makespan

    sizes = tuple(part.last - part.first for part in Interleaved(InterleavedConfig(v=v)).parts(costs, pp))
    assert list(sizes) == expected
    assert step(sizes) < 0.995 * step((layers // (pp * v),) * (pp * v))


def test_the_unit_of_costs_does_not_matter():
    costs = Costs(embedding=0.1, layers=(1.0, 1.0, *[1.7] * 15), head=2.3)
    flops = Costs(embedding=0.1e12, layers=tuple(1e12 * each for each in costs.layers), head=2.3e12)
    for ranks in (range(4), [0, 1, 2, 3, 3, 2, 1, 0]):
        assert balance(costs, ranks) == balance(flops, ranks)


def test_a_deep_model_over_many_stages_is_split_at_once():
    costs = Costs(layers=(0.6,) * 3 + (1.0,) * 123, head=1.7)
    sizes = balance(costs, [*range(32), *reversed(range(32))])
    assert times(sizes, costs, [*range(32), *reversed(range(32))])[0] == pytest.approx(2.0)
    assert sum(sizes) == 126


@pytest.mark.parametrize(
    ("layers", "costs", "expected"),
    [
        (8, (0.0, 0.0), [2, 2, 2, 2]),
        (5, (0.0, 0.0), [1, 1, 2, 1]),  # not the first, which holds most activations, nor the head's
        (7, (0.0, 0.0), [2, 2, 2, 1]),
        (10, (0.0, 1.5), [3, 3, 3, 1]),
        (61, (0.0, 1.0), [15, 16, 16, 14]),
    ],
)
def test_balance_by_hand(layers, costs, expected):
    embedding, head = costs
    assert balance(Costs(embedding=embedding, layers=(1.0,) * layers, head=head), range(4)) == expected


def test_virtual_stages_spread_over_the_ranks():
    parts = Interleaved(InterleavedConfig(v=2)).parts(Costs.alike(11), 4)
    assert [part.last - part.first for part in parts] == [1, 1, 1, 1, 2, 2, 2, 1]
    load = [sum(p.last - p.first for p in parts if p.rank == rank) for rank in range(4)]
    assert sorted(load) == [2, 3, 3, 3]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, [3, 1]),  # 3 and 1 + 1.22 layers in place of 2 and 2 + 1.22
        ({"head_cost": 0.0}, [2, 2]),
        ({"head_cost": 4.0}, [4, 0]),
        ({"head_cost": 0.0, "embedding_cost": 2.0}, [1, 3]),
        ({"layers": (2, 2)}, [2, 2]),
    ],
    ids=str,
)
def test_ends_cost_what_the_model_says_unless_the_recipe_does(config, sizes):
    costs = Costs(layers=(5.14e6,) * 4, head=6.29e6)
    parts = OneForwardOneBackward(PipelineConfig(**config)).parts(costs, 2)
    assert [part.last - part.first for part in parts] == sizes


def test_the_recipe_counts_in_mean_layers():
    costs = Costs(layers=(1.0, 3.0, 3.0, 1.0), head=100.0)
    parts = OneForwardOneBackward(PipelineConfig(head_cost=2.0)).parts(costs, 2)
    assert [part.last - part.first for part in parts] == [3, 1]  # 7 and 1 + 2 * 2


def test_placements():
    v = DualPipeV(PipelineConfig()).parts(Costs.alike(8), 2)
    assert [part.rank for part in v] == [0, 1, 1, 0]
    assert v[0] == Part(first=0, last=2, has_embedding=True, has_head=False, rank=0)
    assert v[3] == Part(first=6, last=8, has_embedding=False, has_head=True, rank=0)
    loop = Interleaved(InterleavedConfig(v=3)).parts(Costs.alike(6), 2)
    assert [part.rank for part in loop] == [0, 1, 0, 1, 0, 1]


def test_a_list_may_leave_a_stage_without_layers():
    parts = OneForwardOneBackward(PipelineConfig(layers=(3, 2, 0))).parts(Costs.alike(5), 3)
    assert [(part.first, part.last) for part in parts] == [(0, 3), (3, 5), (5, 5)]
    assert parts[2].has_head


@pytest.mark.parametrize(
    ("schedule", "layers", "pp", "text"),
    [
        (
            OneForwardOneBackward(PipelineConfig(layers=(3, 2))),
            6,
            2,
            "layers = [3, 2] adds up to 5; expected 6, the model's layers; [3, 3] would do",
        ),
        (
            OneForwardOneBackward(PipelineConfig(layers=(9, 1))),
            6,
            2,
            "layers = [9, 1] adds up to 10; expected 6, the model's layers",
        ),
        (
            Interleaved(InterleavedConfig(layers=(3, 3))),
            6,
            2,
            "layers = [3, 3] names 2 stages; expected 4 stages (pp 2 x 2 on each rank)",
        ),
        (
            OneForwardOneBackward(PipelineConfig(layers=(3, 0, 3))),
            6,
            3,
            "layers = [3, 0, 3] leaves nothing to rank 1: give it a layer, or lower pp",
        ),
        (
            OneForwardOneBackward(PipelineConfig()),
            3,
            4,
            "3 layers cannot fill 4 stages (pp 4): at most pp = 3, "
            "or list [schedule] layers, where a stage may have 0",
        ),
        (
            Interleaved(InterleavedConfig(v=3)),
            5,
            2,
            "5 layers cannot fill 6 stages (pp 2 x 3 on each rank): at most pp = 1, "
            "or at most v = 2, or list [schedule] layers, where a stage may have 0",
        ),
        (
            DualPipeV(PipelineConfig()),
            5,
            4,
            "5 layers cannot fill 8 stages (pp 4 x 2 on each rank): at most pp = 2, "
            "or list [schedule] layers, where a stage may have 0",
        ),
    ],
)
def test_what_cannot_be_split_says_what_can(schedule, layers, pp, text):
    whatever_they_cost = Costs(embedding=2.0, layers=tuple(1.0 + n for n in range(layers)), head=9.0)
    for costs in (Costs.alike(layers), whatever_they_cost):
        with pytest.raises(ValueError, match="layers") as caught:
            schedule.parts(costs, pp)
        assert str(caught.value) == text
