"""Runs in NVFP4 resumed in bfloat16, and back, through the checkpoints of both."""

import shutil

import pytest

from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import train

CHANGES = {"run": {"steps": 4}, "optimizer": {"use": "adamw", "lr": 1e-3}}


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [("nvfp4", "bf16"), ("bf16", "nvfp4")])
def test_a_checkpoint_goes_on_in_the_other_precision(before, after, tmp_path):
    """It has the same tensors; the step that follows is of the new precision, near that of the old one."""
    first, second = (Case("precision", use=use) for use in (before, after))
    through = train(first, CHANGES, folder=tmp_path / "run", save_at=2)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    resumed = train(second, CHANGES, folder=tmp_path / "again", resume="2")
    assert {t.name: (t.tensor.shape, t.tensor.dtype) for t in resumed.weights} == {
        t.name: (t.tensor.shape, t.tensor.dtype) for t in through.weights
    }
    losses, wanted = ([r.loss for r in t.reports][-2:] for t in (resumed, through))
    assert losses == pytest.approx(wanted, rel=0.05)
    assert losses != wanted
