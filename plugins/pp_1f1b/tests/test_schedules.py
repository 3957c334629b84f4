"""Orders are complete and can run; idle time and live activations are those of the formulas."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig, components

from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import Durations, simulate

SCHEDULES = {
    "gpipe": components.GPipe(PipelineConfig()),
    "1f1b": components.OneForwardOneBackward(PipelineConfig()),
    "interleaved_1": components.Interleaved(InterleavedConfig(v=1)),
    "interleaved_2": components.Interleaved(InterleavedConfig(v=2)),
    "interleaved_5": components.Interleaved(InterleavedConfig(v=5)),
    "zb_h1": components.ZeroBubbleH1(PipelineConfig()),
    "dualpipe_v": components.DualPipeV(PipelineConfig()),
}

names = st.sampled_from(sorted(SCHEDULES))
degrees = st.integers(1, 12)
counts = st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(names, degrees, counts)
def test_every_pass_happens_once_on_the_rank_of_its_stage(name, p, m):
    schedule = SCHEDULES[name]
    placement = schedule.placement(p)
    for rank, actions in enumerate(schedule.actions(p, m)):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        found = Counter(actions)
        wanted = {Action(kind, stage, i) for kind in ("F", "B") for stage in stages for i in range(m)}
        assert {action for action in found if action.kind != "W"} == wanted
        assert set(found.values()) == {1}
        assert {(w.stage, w.microbatch) for w in found if w.kind == "W"} <= {
            (b.stage, b.microbatch) for b in wanted
        }


@settings(deadline=None, max_examples=60)
@given(names, degrees, counts)
def test_every_order_runs_to_its_end_with_microbatches_in_turn(name, p, m):
    lists = SCHEDULES[name].actions(p, m)
    timeline = simulate(lists)  # raises where ranks would wait for each other
    assert [len(row) for row in timeline.rows] == [len(actions) for actions in lists]
    for actions in lists:
        for kind, stage in {(a.kind, a.stage) for a in actions if a.kind != "W"}:
            assert [a.microbatch for a in actions if (a.kind, a.stage) == (kind, stage)] == list(range(m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 13, 32])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1"])
def test_bubble_of_gpipe_and_1f1b(name, p, m):
    timeline = simulate(SCHEDULES[name].actions(p, m))
    assert timeline.bubble() == pytest.approx(float(Fraction(p - 1, m + p - 1)), abs=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 2, 3, 7, 8, 9, 20])
def test_bubble_of_interleaved_for_any_number_of_microbatches_from_pp_on(p, v, extra):
    m = p + extra
    timeline = simulate(components.Interleaved(InterleavedConfig(v=v)).actions(p, m))
    assert timeline.bubble() == pytest.approx(float(Fraction(p - 1, v * m + p - 1)), abs=1e-12)


#: Times of F, of B's first half and of W. The formulas hold where W is not the longest.
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 1.0), (2.0, 2.0, 1.0), (1.5, 1.0, 1.0)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_idle_time_of_zb_h1(p, times):
    f, b, w = times
    durations = Durations(forward=f, backward=b, weight=w)
    for m in (p, p + 1, 2 * p + 3, 40):
        zb_h1 = simulate(SCHEDULES["zb_h1"].actions(p, m), durations)
        assert zb_h1.makespan - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w))
        plain = simulate(SCHEDULES["1f1b"].actions(p, m), durations)
        assert plain.makespan - m * (f + b + w) == pytest.approx((p - 1) * (f + b + w))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_idle_time_of_dualpipe_v(p, times):
    f, b, w = times
    published = (p - 1) * ((f + b + w) + (b + w) - 3 * w)  # DualPipe's README, F&B one after the other
    for m in (2 * p, 2 * p + 1, 5 * p, 40):
        timeline = simulate(SCHEDULES["dualpipe_v"].actions(p, m), Durations(forward=f, backward=b, weight=w))
        idle = timeline.makespan - 2 * m * (f + b + w)
        assert idle <= published + 1e-9
        if b <= f:  # then a rank need not wait for the pair as a whole
            assert idle == pytest.approx((p - 1) * (f + b - w))


@settings(deadline=None, max_examples=60)
@given(degrees, counts)
def test_live_activations(p, m):
    peaks = {name: simulate(schedule.actions(p, m)) for name, schedule in SCHEDULES.items()}
    for rank in range(p):
        assert peaks["gpipe"].peak(rank) == m
        assert peaks["1f1b"].peak(rank) == min(m, p - rank)
        assert peaks["zb_h1"].peak(rank) == min(m, p)
        assert peaks["dualpipe_v"].peak(rank) <= min(2 * m, 2 * p + 1)
        if m >= 2 * p:
            assert peaks["dualpipe_v"].peak(rank) == 2 * p + 1


@settings(deadline=None, max_examples=60)
@given(degrees, counts, st.integers(1, 6))
def test_live_activations_of_interleaved(p, m, v):
    timeline = simulate(components.Interleaved(InterleavedConfig(v=v)).actions(p, m))
    largest = -(-m // max(1, m // p))
    for rank in range(p):
        assert timeline.peak(rank) == min(v * m, (v - 1) * largest + 2 * (p - 1 - rank) + 1)
