"""Boxes are assigned evenly, each once, and make up every tensor."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_sharded_ckpt_v2.save_plan import make_plan

from nanotrain_core.checkpoint.box_cover import coverage_problem, overlap
from nanotrain_core.checkpoint.tensor_boxes import boxes
from nanotrain_core.errors import CheckpointError


def holding(name, offset, shape, whole=(8, 4), dtype="F32", frozen=False):
    return (name, dtype, whole, offset, shape, frozen)


def test_replicas_are_written_once_and_evenly():
    held = [holding(f"layer.{number}", (0, 0), (8, 4)) for number in range(8)]
    plan = make_plan([held] * 4)
    assert [len(mine) for mine in plan.mine] == [2, 2, 2, 2]
    assert sorted(position for mine in plan.mine for position in mine) == list(range(8))


def test_what_one_rank_holds_counts_before_what_many_hold():
    shared = holding("shared", (0, 0), (8, 4))
    plan = make_plan([[shared, holding("own", (0, 0), (8, 4))], [shared]])
    assert [list(mine) for mine in plan.mine] == [[1], [0]]


def test_frozen_boxes_are_assigned_as_evenly_and_apart():
    held = [holding(f"{kind}.{n}", (0, 0), (8, 4), frozen=kind == "f") for n in range(4) for kind in "ft"]
    plan = make_plan([held] * 2)
    assert [[held[at][0][0] for at in each] for each in plan.mine] == [["t", "t"]] * 2
    assert [[held[at][0][0] for at in each] for each in plan.frozen] == [["f", "f"]] * 2
    assert {n: {number for number, _, _ in t.chunks} <= {2, 3} for n, t in plan.tensors.items()} == {
        each[0]: each[5] for each in held
    }


def test_what_is_frozen_on_some_ranks_alone_may_change():
    plan = make_plan([[holding("w", (0, 0), (8, 4), frozen=frozen)] for frozen in (True, False)])
    assert (plan.mine, plan.frozen) == ([[0], []], [[], []])


def test_the_division_does_not_depend_on_the_order_of_blocks():
    held = [holding(f"layer.{number}", (0, 0), (8, 4)) for number in range(5)]
    one, other = make_plan([held, held]), make_plan([held[::-1], held[::-1]])
    assert one.tensors == other.tensors


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([[holding("w", (0, 0), (4, 4))]], "w are not the whole tensor: its blocks hold 16 numbers"),
        (
            [[holding("w", (0, 0), (8, 4)), holding("w", (4, 0), (8, 4))]],
            r"\(4, 0\) of shape \(8, 4\) is outside",
        ),
        (
            [[holding("w", (0, 0), (4, 4))], [holding("w", (2, 0), (4, 4))]],
            r"blocks at \(0, 0\) and \(2, 0\) overlap",
        ),
        (
            [[holding("w", (0, 0), (8, 4))], [holding("w", (0, 0), (8, 4), dtype="F64")]],
            r"w is F64 \(8, 4\) on rank 1 and F32 \(8, 4\) on rank 0",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(held, said):
    with pytest.raises(CheckpointError, match=said):
        make_plan(held)


@settings(deadline=None)
@given(st.data())
def test_flat_ranges_make_up_a_tensor_and_a_missing_box_is_noticed(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = 1
    for length in shape:
        size *= length
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    parts = [box for start, stop in pairwise(cuts) for box in boxes(shape, start, stop)]
    assert coverage_problem(shape, parts) == ""
    lost = data.draw(st.integers(0, len(parts) - 1))
    assert coverage_problem(shape, parts[:lost] + parts[lost + 1 :])
    assert coverage_problem(shape, [*parts, parts[lost]])


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 4))] * 2), max_size=6))
def test_overlap_is_found_where_there_is_one(sides):
    found = [(tuple(o for o, _ in side), tuple(n for _, n in side)) for side in sides]
    cells = [{*product(*(range(o, o + n) for o, n in side))} for side in sides]
    truth = any(cells[i] & cells[j] for i in range(len(cells)) for j in range(i))
    assert (overlap(found) is not None) == truth


def test_scalars():
    assert coverage_problem((), [((), ())]) == ""
    assert coverage_problem((), [((), ()), ((), ())]) == "its blocks hold 2 numbers, but () has 1"
    assert coverage_problem((0, 3), [((0, 0), (0, 3))]) == ""
