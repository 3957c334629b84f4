"""Gradients where backward is split: W passes reduce buckets as they complete, and lose none."""

import pytest
import torch
from as_one_process import assert_trains_as_one_process

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

LIMIT = 0.02  # MB: a bucket has few weights of the many in a stage


def case(schedule, pp=2, overlap=True, tied=False, microbatches=6):
    optimizer = {"bucket_mb": LIMIT, "stage": 2, "overlap": overlap}
    model = {"layers": 8, "width": 32, "heads": 2, "vocab": 32, "tied": tied}
    overrides = {
        "precision": {"use": "fp64"},
        "schedule": {"use": schedule},
        "batch": {"sequences": 2 * microbatches, "microbatch": 1, "length": 8},
        "data": {"vocab": 32},
        "model": {"use": "transformer", **model},
    }
    topology = {"pp": pp, "dp": 2}
    return Case("optimizer", use="zero12", config=optimizer, topology=topology, overrides=overrides)


def most_in_w_passes(case):
    """Return the elements of deferred gradients that are held at most at once, and of all of a stage's."""
    engine = make_engine(case, {"run": {"steps": 1}})
    sync, most, whole = engine.run.gradients, [0], [0]
    arrived = type(sync).on_gradient

    def note(parameter):
        computing = engine.run.passes.computing
        if computing is not None:
            whole.append(sum(weight.numel() for weight in computing))
            most.append(sum(w.numel() for w in computing if w.grad is not None))
        arrived(sync, parameter)

    sync.on_gradient = note
    engine.fit()
    return max(most), max(whole), max(weight.numel() for weight in sync.queue_of)


@pytest.mark.full_cases("zb_h1")
@pytest.mark.parametrize("schedule", ["zb_h1", "dualpipe_v"])
def test_a_w_pass_holds_the_gradients_of_a_few_buckets_and_not_of_the_stage(schedule):
    bucket = LIMIT * 2**20 // torch.float64.itemsize
    for most, whole, largest in run_ranks(most_in_w_passes, 4, case(schedule)):
        assert most <= bucket + 2 * largest < whole / 2
    for most, whole, _ in run_ranks(most_in_w_passes, 4, case(schedule, overlap=False)):
        assert most == whole


def started_in_the_last_w_pass(case):
    """Return how many of a rank's buckets start before the step's last W pass ends, and how many it has."""
    engine = make_engine(case, {"run": {"steps": 1}})
    sync, started = engine.run.gradients, []
    done = type(sync).microbatch_done

    def note(parameters):
        started.append(sync.queue.sent)
        done(sync, parameters)

    sync.microbatch_done = note
    engine.fit()
    return started[-1], len(sync.queue.buckets)


@pytest.mark.full_cases("True", "False")
@pytest.mark.parametrize("tied", [False, True])
def test_all_reduces_start_in_the_last_w_pass(tied):
    base = case("zb_h1", tied=tied)
    parallel = [{"use": "ddp", "bucket_mb": LIMIT}]
    overrides = {**base.overrides, "optimizer": {"use": "adamw"}, "parallel": parallel}
    replicated = Case("topology", use="grid", topology={"pp": 2, "dp": 2}, overrides=overrides)
    for started, buckets in run_ranks(started_in_the_last_w_pass, 4, replicated):
        assert buckets > 2
        assert started >= buckets - (2 if tied else 1)
    assert_trains_as_one_process(replicated)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "pp"), [("zb_h1", 1), ("zb_h1", 2), ("dualpipe_v", 2)])
def test_a_tied_weight_with_gradients_in_both_passes_gets_all_of_them(schedule, pp):
    """In one stage it gets an embedding's gradient in the B pass, and a head's in the W pass."""
    assert_trains_as_one_process(case(schedule, pp, tied=True))
