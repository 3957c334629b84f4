"""A checkpoint of a run over pp, dp and ep goes on as if it had not stopped, there and on other layouts."""

import pytest
import torch
from compositions import Composition

from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train

ADAMW = {"optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}}


def case(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "deepseek_v3", "tied": True, "microbatch": 2, "experts_first": False}
    return Composition(**(defaults | more | choices)).case()


SOURCE = case(pp=2, dp=2, ep=2, schedule="1f1b")
TARGETS = {
    "same": SOURCE,
    "one rank": case(),
    "tp2-pp2": case(tp=2, pp=2, ep=2, schedule="zb_h1", sp=True),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train 3 steps and keep the checkpoint after the second."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(train, 4, SOURCE, ADAMW, folder=folder, save_at=2)


@pytest.mark.parametrize("target", TARGETS)
def test_goes_on_from_step_two(saved, target):
    folder, straight = saved
    found = run_ranks(train, TARGETS[target].world_size, TARGETS[target], ADAMW, folder=folder, resume="2")
    atol = 0.0 if target == "same" else 1e-9
    for part in ("weights", "state"):
        got, want = (whole([getattr(t, part) for t in traces], atol=1e-9) for traces in (found, straight))
        assert_same(got, want, f"{part} on {target}", atol=atol)
    loss, norm = (
        torch.tensor([getattr(t[0].reports[-1], f) for t in (found, straight)]) for f in ("loss", "grad_norm")
    )
    torch.testing.assert_close(loss[0], loss[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(norm[0], norm[1], rtol=0, atol=1e-9)


def test_a_resumed_run_may_change_how_the_model_is_trained(saved):
    folder, _ = saved
    changes = ADAMW | {"model": {"bias_update_rate": 0.0, "mtp_weight": 0.1}}
    assert [r.step for r in run_ranks(train, 4, SOURCE, changes, folder=folder, resume="2")[0].reports] == [3]
