"""The simulator agrees with timelines drawn by hand."""

import pytest

from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import Durations, simulate


def order(text):
    """Read actions such as ``F0.1``: forward, stage 0, microbatch 1."""
    return [Action(word[0], *map(int, word[1:].split("."))) for word in text.split()]


def times(timeline):
    return [[(str(slot.action), slot.start, slot.end) for slot in row] for row in timeline.rows]


TWO_STAGES = [order("F0.0 F0.1 B0.0 B0.1"), order("F1.0 B1.0 F1.1 B1.1")]


def test_two_stages_by_hand():
    timeline = simulate(TWO_STAGES)
    assert times(timeline) == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 4, 6), ("B0.1", 7, 9)],
        [("F1.0", 1, 2), ("B1.0", 2, 4), ("F1.1", 4, 5), ("B1.1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert timeline.busy(0) == 6
    assert timeline.bubble(1) == pytest.approx(1 / 3)
    assert timeline.bubble() == pytest.approx(1 / 3)
    assert [timeline.peak(rank) for rank in range(2)] == [2, 1]


def test_weight_gradients_of_their_own_shorten_their_backward_and_hold_activations():
    timeline = simulate([order("F0.0 F0.1 B0.0 B0.1 W0.0"), order("F1.0 B1.0 W1.0 F1.1 B1.1")])
    assert times(timeline) == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 3, 4), ("B0.1", 7, 9), ("W0.0", 9, 10)],
        [("F1.0", 1, 2), ("B1.0", 2, 3), ("W1.0", 3, 4), ("F1.1", 4, 5), ("B1.1", 5, 7)],
    ]
    held_until_w = simulate([order("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1")])
    assert held_until_w.peak(0) == 2
    assert simulate([order("F0.0 B0.0 F0.1 B0.1")]).peak(0) == 1


def test_times_differ_between_stages_and_messages_take_time_but_not_within_a_rank():
    durations = Durations(forward=(1, 2, 3), backward=1, weight=(0.5, 0, 0), p2p=10)
    timeline = simulate([order("F0.0 F1.0 B1.0 B0.0"), order("F2.0 B2.0")], durations)
    assert times(timeline) == [
        [("F0.0", 0, 1), ("F1.0", 1, 3), ("B1.0", 27, 28), ("B0.0", 28, 29.5)],
        [("F2.0", 13, 16), ("B2.0", 16, 17)],
    ]
    assert timeline.stages(0) == (0, 1)
    assert timeline.peak(0) == 2


def test_lists_that_wait_for_each_other_are_told():
    with pytest.raises(ValueError, match=r"no rank can go on; they wait to run rank 0: B0\.0, rank 1: F1\.1"):
        simulate([order("F0.0 B0.0 F0.1 B0.1"), order("F1.1 F1.0 B1.0 B1.1")])


def test_nothing_to_do_takes_no_time():
    timeline = simulate([[], []])
    assert (timeline.makespan, timeline.bubble(), timeline.peak(0)) == (0, 0, 0)
