"""A checkpoint of a run over pp, dp and ep goes on as if it had not stopped, there and on other layouts.

In both formats, and whether each rank keeps the optimizer state of all it holds or zero12 shards it.
"""

import pytest
import torch
from compositions import Composition

from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}


def layout(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "deepseek_v3", "tied": True, "microbatch": 2, "experts_first": False, "zero": 0}
    return Composition(**(defaults | more | choices))


SOURCE = layout(pp=2, dp=2, ep=2, schedule="1f1b")
SHARED_OUT = layout(dp=4, ep=2, etp=2, zero=2)
TARGETS = {
    "same": SOURCE,
    "one rank": layout(),
    "tp2-pp2": layout(tp=2, pp=2, ep=2, schedule="zb_h1", sp=True),
    "zero2-dp4-ep2-etp2": SHARED_OUT,
}


def run(composition, kind, folder, *, model=None, **options):
    """Train 3 steps, with keys of the model changed; return every rank's trace."""
    changes = {
        "optimizer": composition.optimizers()["adamw"] if composition.zero else ADAMW,
        "checkpoint": {"use": kind},
        "model": model or {},
    }
    return run_ranks(train, composition.ranks, composition.case(), changes, folder=folder, **options)


@pytest.fixture(scope="module", params=["simple", "sharded_v2"])
def saved(request, tmp_path_factory):
    """Train 3 steps and keep the checkpoint after the second."""
    folder = tmp_path_factory.mktemp("run")
    return request.param, folder, run(SOURCE, request.param, folder, save_at=2)


def assert_goes_on(found, straight, atol):
    for part in ("weights", "state"):
        got, want = (whole([getattr(t, part) for t in traces], atol=1e-9) for traces in (found, straight))
        assert_same(got, want, part, atol=atol)
    for field in ("loss", "grad_norm"):
        got, want = (torch.tensor(getattr(t[0].reports[-1], field)) for t in (found, straight))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


# The harness has a checkpoint that goes on as it was.
EACH = [pytest.param(name, marks=[pytest.mark.full] * (name == "same")) for name in TARGETS]


@pytest.mark.full_cases(
    "sharded_v2-zero2-dp4-ep2-etp2",
    "sharded_v2-one rank",
    "simple-one rank",
    "simple-zero2-dp4-ep2-etp2",
    "simple-tp2-pp2",
)
@pytest.mark.parametrize("target", EACH)
def test_goes_on_from_step_two(saved, target):
    kind, folder, straight = saved
    found = run(TARGETS[target], kind, folder, resume="2")
    assert_goes_on(found, straight, atol=0.0 if target == "same" else 1e-9)


@pytest.mark.full
def test_goes_back_from_sharded_state_to_whole(tmp_path):
    straight = run(SHARED_OUT, "sharded_v2", tmp_path, save_at=2)
    assert_goes_on(run(SOURCE, "sharded_v2", tmp_path, resume="2"), straight, atol=1e-9)


@pytest.mark.full_cases("simple")
def test_a_resumed_run_may_change_how_the_model_is_trained(saved):
    kind, folder, _ = saved
    changes = {
        "optimizer": ADAMW,
        "checkpoint": {"use": kind},
        "model": {"bias_update_rate": 0.0, "mtp_weight": 0.1},
    }
    traces = run_ranks(train, 4, SOURCE.case(), changes, folder=folder, resume="2")
    assert [r.step for r in traces[0].reports] == [3]


@pytest.mark.full_cases("simple")
def test_goes_on_with_the_layers_split_otherwise(saved):
    kind, folder, straight = saved
    changes = {
        "optimizer": ADAMW,
        "checkpoint": {"use": kind},
        "schedule": {"use": "1f1b", "layers": [1, 3]},  # balanced, they are 3 and 1: MTP hangs at the head
    }
    found = run_ranks(train, 4, SOURCE.case(), changes, folder=folder, resume="2")
    names = {block.name for block in found[0].weights}
    assert not any(name.startswith("layers.1.") for name in names), "rank 0 has one layer now"
    assert any(block.name.startswith("layers.2.") for block in straight[0].weights), "rank 0 had three"
    assert_goes_on(found, straight, atol=1e-9)
