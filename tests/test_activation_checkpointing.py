"""Activation checkpointing: gradients as before, in the memory of one layer."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanotrain_core.batch import Batch
from nanotrain_core.testing import Case, conformance, run_ranks
from nanotrain_core.testing.probe import make_run

LAYERS = 6


def case(every, **around):
    table = {"parallel": [{"use": "recompute", "every": every}, {"use": "summed"}], **around}
    model = {"layers": LAYERS, "ffn": 96}
    config = {"every": every}
    return Case(
        "parallel", use="recompute", config=config, topology={"dp": 2}, overrides={**table, "model": model}
    )


test_conformance = conformance(case(1))
test_exhaustively = pytest.mark.full(conformance(case(2), case(2, schedule={"use": "accumulate"})))


def kept(recompute):
    """Return the bytes that one forward pass leaves for backward, and the gradients."""
    wrappers = [{"use": "recompute", "every": recompute}] if recompute else []
    whole = Case("model", use="transformer", config={"layers": LAYERS}, overrides={"parallel": wrappers})
    (part,) = make_run(whole, {}).stages.values()
    tokens = torch.arange(64 * 16).remainder(64).view(64, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = part(tokens, Batch(tokens, tokens))
    (loss,) = output.losses.values()
    loss.backward()
    memory = sum(event.self_device_memory_usage + event.self_cpu_memory_usage for event in profiler.events())
    return memory, [parameter.grad for parameter in part.parameters()]


def test_of_a_layer_its_input_alone_is_kept():
    (plain, gradients), (second, _), (all_of_them, again) = (run_ranks(kept, 1, n)[0] for n in (0, 2, 1))
    hidden = 64 * 16 * 32 * 8  # float64
    assert plain - all_of_them > 10 * LAYERS * hidden
    assert all_of_them < 0.2 * plain
    assert second == pytest.approx((plain + all_of_them) / 2, rel=0.05)
    for one, other in zip(gradients, again, strict=True):
        assert torch.equal(one, other)
