"""What a rank keeps: 12P/N bytes of optimizer state, 8P/N where a float32 weight is its own master."""

import gc

import pytest
import torch
from nanotrain_zero12.flat import ALIGN

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine, make_run, push

SMALL = {"bucket_mb": 0.01}


def case(stage, ranks, precision, **config):
    overrides = {"precision": {"use": precision}}
    settings = {**SMALL, "stage": stage, **config}
    return Case("optimizer", use="zero12", config=settings, topology={"dp": ranks}, overrides=overrides)


def state_bytes(case):
    """Return parameters, and this rank's bytes of state per parameter-sized tensor, after a step."""
    run = make_run(case, {})
    push(run, 0, 1.0)
    run.optimizer.step()
    sizes = {}
    for block in run.optimizer.blocks():
        if block.global_shape:
            kind = block.name.partition("/")[0]
            sizes[kind] = sizes.get(kind, 0) + block.tensor.nbytes
    buckets = sum(len(queue.buckets) for queue in run.optimizer.queues)
    return sum(p.parameter.numel() for p in run.placed), buckets, sizes


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("precision", "config", "expected"),
    [
        ("bf16", {}, {"master": 4, "exp_avg": 4, "exp_avg_sq": 4}),
        ("fp32", {}, {"exp_avg": 4, "exp_avg_sq": 4}),
        ("bf16", {"moment_dtype": "bfloat16"}, {"master": 4, "exp_avg": 2, "exp_avg_sq": 2}),
    ],
    ids=["12P/N", "8P/N", "8P/N-narrow"],
)
def test_each_rank_keeps_its_share_of_the_state_and_no_more(stage, precision, config, expected):
    ranks = 4
    results = run_ranks(state_bytes, ranks, case(stage, ranks, precision, **config))
    parameters = results[0][0]
    for kind, width in expected.items():
        assert sum(sizes[kind] for _, _, sizes in results) == width * parameters
    for _, buckets, sizes in results:
        assert sizes.keys() == expected.keys()
        assert sum(sizes.values()) <= sum(expected.values()) * (parameters / ranks + buckets * ALIGN)


def live_bytes():
    """Return the bytes of all tensors this process holds, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def everything_alive(case):
    """Return how much a run adds to a process, once it has stepped and forgotten its gradients."""
    before = live_bytes()
    run = make_run(case, {})
    push(run, 0, 1.0)
    run.optimizer.step()
    run.gradients.zero()
    return sum(p.parameter.numel() for p in run.placed), live_bytes() - before


def test_float32_has_one_copy_of_the_weights_two_moments_and_one_shard_of_gradients():
    """4P of weights, and 12P/N: no second copy of anything, in a model large enough to see it."""
    large = {"model": {"width": 128, "ffn": 512}}
    ranks = 2
    sharded = case(2, ranks, "fp32", bucket_mb=0.05)
    sharded = Case(
        "optimizer",
        use="zero12",
        config=sharded.config,
        topology={"dp": ranks},
        overrides={"precision": {"use": "fp32"}, "kernels": {"use": "torch"}, **large},
    )
    for parameters, held in run_ranks(everything_alive, ranks, sharded):
        assert held / parameters == pytest.approx(4 + 12 / ranks, rel=0.08)


def gradients_between_microbatches(case):
    """Return after each microbatch whether any parameter still has a gradient of its own."""
    engine = make_engine(case, {"run": {"steps": 1}})
    sync, seen = engine.run.gradients, []
    end = type(sync).microbatch_done

    def note(parameters):
        end(sync, parameters)
        held = [p for p in sync.queue_of if p.grad is not None]
        seen.append(len(held))

    sync.microbatch_done = note
    engine.fit()
    return len(sync.queue_of), seen


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_stage_2_holds_no_whole_gradient_between_microbatches(precision):
    for parameters, seen in run_ranks(gradients_between_microbatches, 2, case(2, 2, precision)):
        assert parameters > 0
        assert seen == [0, 0]
    for parameters, seen in run_ranks(gradients_between_microbatches, 2, case(1, 2, precision)):
        assert seen == [parameters, 0]
