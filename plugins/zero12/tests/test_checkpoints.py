"""State saved by adamw goes on in zero12, by zero12 in adamw, on any number of ranks, moments included."""

import tempfile
from itertools import chain
from pathlib import Path

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}
ZERO = {**ADAMW, "use": "zero12", "bucket_mb": 0.01}
SYNC = {"parallel": [{"use": "summed"}]}


def on(ranks, optimizer, precision, kernels="auto"):
    overrides = {"optimizer": optimizer, "precision": {"use": precision}, "kernels": {"use": kernels}}
    if optimizer["use"] == "adamw" and ranks > 1:
        overrides |= SYNC
    return Case("topology", use="grid", topology={"dp": ranks}, overrides=overrides)


def run(case, folder, *, sequences=8, **options):
    changes = {"run": {"steps": 6}, "batch": {"sequences": sequences, "microbatch": 1}}
    traces = run_ranks(train, case.world_size, case, changes, folder=Path(folder), **options)
    return whole([trace.weights for trace in traces]), whole([trace.state for trace in traces])


LAYOUTS = [
    (1, ADAMW, 2, {**ZERO, "stage": 2}, "auto"),
    pytest.param(2, {**ZERO, "stage": 2}, 1, ADAMW, "auto", marks=pytest.mark.full),
    pytest.param(2, ADAMW, 4, {**ZERO, "stage": 1}, "auto", marks=pytest.mark.full),
    pytest.param(4, {**ZERO, "stage": 2}, 2, {**ZERO, "stage": 1}, "torch", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("before", "saver", "after", "loader", "kernels"), LAYOUTS)
def test_a_run_goes_on_with_the_other_optimizer_on_other_ranks(before, saver, after, loader, kernels):
    with tempfile.TemporaryDirectory() as folder:
        weights, state = run(on(before, saver, "fp64"), folder, save_at=3)
        resumed_weights, resumed_state = run(
            on(after, loader, "fp64", kernels), folder, save_at=3, resume="3"
        )
    assert_same(resumed_weights, weights, "weights after resuming", atol=1e-9)
    assert_same(resumed_state, state, "state after resuming", atol=1e-9)
    prefixes = {name.partition("/")[0] for name in state}
    assert prefixes == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.full
def test_deepspeed_2898_and_5405_state_of_four_ranks_goes_on_with_three():
    sharded = {**ZERO, "stage": 2}
    with tempfile.TemporaryDirectory() as folder:
        straight = run(on(4, sharded, "fp64"), folder, sequences=12, save_at=3)
        resumed = run(on(3, sharded, "fp64"), folder, sequences=12, save_at=3, resume="3")
    for what, one, other in zip(("weights", "state"), straight, resumed, strict=True):
        assert_same(other, one, f"{what} after resuming", atol=1e-9)


def test_masters_of_narrow_weights_travel_too():
    with tempfile.TemporaryDirectory() as folder:
        weights, state = run(on(1, ADAMW, "bf16"), folder, save_at=6)
        sharded = on(2, {**ZERO, "stage": 2}, "bf16")
        loaded_weights, loaded_state = run(sharded, folder, resume="6")
    assert {name.partition("/")[0] for name in state} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert_same(loaded_weights, weights, "weights", atol=0.0)
    assert_same(loaded_state, state, "state", atol=0.0)


def test_every_range_of_a_parameter_has_the_step_that_was_saved():
    """A large parameter lies in several buckets: each of its ranges counts steps of its own."""
    tiny = {**ZERO, "stage": 1, "bucket_mb": 0.0005}
    with tempfile.TemporaryDirectory() as folder:
        run(on(1, ADAMW, "fp64"), folder, save_at=3)
        case = on(2, tiny, "fp64")
        steps = run_ranks(steps_of_all_ranges, 2, case, Path(folder))
    assert set(chain.from_iterable(steps)) == {3.0}
    assert all(len(each) > 30 for each in steps)


def steps_of_all_ranges(case, folder):
    from nanotrain_core.testing.probe import make_engine

    engine = make_engine(case, {"run": {"steps": 3}}, folder=folder, resume="3")
    engine.fit()
    optimizer = engine.run.optimizer
    return [optimizer.inner.state[shard.weight]["step"].item() for shard in optimizer.master_shards]


def test_narrow_moments_are_saved_as_they_are():
    narrow = {**ZERO, "stage": 2, "moment_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        through = run(on(2, narrow, "fp32"), folder, save_at=3)
        resumed = run(on(2, narrow, "fp32"), folder, save_at=3, resume="3")
    for one, other in zip(through, resumed, strict=True):
        assert_same(other, one, "resumed", atol=0.0)
