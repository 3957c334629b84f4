"""Ranks of several hosts that do not see the same under one path: never is a mixture loaded."""

import pytest
import torch.distributed as dist
from nanotrain_sharded_ckpt_v2 import ShardedConfig
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint
from small_run import opened, state

from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.testing import run_ranks


def load_own(folder, which, verify):
    """Load on this rank, which has a folder of its own; return the error, or what was loaded."""
    rank = dist.get_rank()
    checkpoint = ShardedCheckpoint(ShardedConfig(verify=verify))
    checkpoint.open(folder / str(rank), Mesh(Layout({"dense": View(("dp",), (2,))}), rank=rank))
    live = state(0)
    try:
        loaded = checkpoint.load(which, live)
    except CheckpointError as error:
        assert live.blocks[0].tensor.tolist() == state(0).blocks[0].tensor.tolist()
        return str(error)
    return None if loaded is None else [block.tensor.tolist() for block in loaded.blocks]


def save_filled(folder, fill):
    """Save step 1 filled with a number, as one branch of a run or another would have."""
    checkpoint = opened(folder)
    checkpoint.save(1, state(1, fill))
    checkpoint.advance(wait=True)


@pytest.mark.parametrize("verify", ["full", "size", "none"])
@pytest.mark.parametrize("which", ["1", "latest"])
def test_ranks_that_see_different_checkpoints_under_one_name_are_refused(tmp_path, which, verify):
    """A disk of its own, or a moment ago on a shared one, where the folder was set aside and saved anew."""
    for rank in range(2):
        save_filled(tmp_path / str(rank), float(rank))
    for refused in run_ranks(load_own, 2, tmp_path, which, verify):
        assert "rank 1: " in refused
        assert "is another checkpoint there than on rank 0" in refused


def test_copies_of_one_checkpoint_are_loaded(tmp_path):
    for rank in range(2):
        save_filled(tmp_path / str(rank), 7.0)
    one, other = run_ranks(load_own, 2, tmp_path, "latest", "full")
    assert one == other == [block.tensor.tolist() for block in state(1, 7.0).blocks]
