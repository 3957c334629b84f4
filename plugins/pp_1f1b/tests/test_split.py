"""Layers are split as listed, or such that the slowest stage is as fast as can be."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig
from nanotrain_pp_1f1b.schedules import DualPipeV, Interleaved, OneForwardOneBackward
from nanotrain_pp_1f1b.split import balance

from nanotrain_core.actions import Part

costs = st.sampled_from([0.0, 0.3, 1.0, 1.5, 4.0])


def every_split(layers, stages):
    """Yield every way to give each stage at least one layer."""
    for cuts in combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        yield [last - first for first, last in pairwise(edges)]


def slowest(sizes, embedding, head):
    times = [float(size) for size in sizes]
    times[0] += embedding
    times[-1] += head
    return max(times)


@given(st.integers(1, 5), st.integers(0, 6), costs, costs)
def test_no_split_has_a_faster_slowest_stage(stages, extra, embedding, head):
    sizes = balance(stages + extra, list(range(stages)), embedding, head)
    assert sum(sizes) == stages + extra
    assert min(sizes) >= 1
    best = min(slowest(each, embedding, head) for each in every_split(stages + extra, stages))
    assert slowest(sizes, embedding, head) == best


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
    assert balance(layers, range(4), *costs) == expected


def test_virtual_stages_spread_over_the_ranks():
    parts = Interleaved(InterleavedConfig(v=2)).parts(11, 4)
    assert [part.last - part.first for part in parts] == [1, 1, 1, 1, 2, 2, 2, 1]
    load = [sum(p.last - p.first for p in parts if p.rank == rank) for rank in range(4)]
    assert sorted(load) == [2, 3, 3, 3]


def test_placements():
    v = DualPipeV(PipelineConfig()).parts(8, 2)
    assert [part.rank for part in v] == [0, 1, 1, 0]
    assert v[0] == Part(first=0, last=2, has_embedding=True, has_head=False, rank=0)
    assert v[3] == Part(first=6, last=8, has_embedding=False, has_head=True, rank=0)
    loop = Interleaved(InterleavedConfig(v=3)).parts(6, 2)
    assert [part.rank for part in loop] == [0, 1, 0, 1, 0, 1]


def test_a_list_may_leave_a_stage_without_layers():
    parts = OneForwardOneBackward(PipelineConfig(layers=(3, 2, 0))).parts(5, 3)
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
    with pytest.raises(ValueError, match="layers") as caught:
        schedule.parts(layers, pp)
    assert str(caught.value) == text
