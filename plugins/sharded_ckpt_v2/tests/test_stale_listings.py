"""A host's listing may lag behind what another one has saved, as on NFS: no older checkpoint is used then."""

import re

import pytest
from nanotrain_sharded_ckpt_v2 import folders, steps_of_all_hosts
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint
from small_run import opened, save, state

from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.mesh import Mesh


class TwoHosts(Mesh):
    """Rank 0's mesh. Rank 1, on another host, gives its newest step and its name."""

    def gather(self, value, *dims):
        everyone = super().gather(value, *dims)
        return [*everyone, (3, "host1")] if isinstance(value, tuple) else everyone


@pytest.fixture
def stale(tmp_path, monkeypatch):
    """Return a checkpoint whose folder lists the newest step only from the second look on, or never."""
    first = opened(tmp_path)
    for step in (1, 2, 3):
        save(first, step)
    checkpoint = ShardedCheckpoint(first.config)
    checkpoint.open(tmp_path, TwoHosts(first.mesh.layout))
    list_all, looks = folders.once_saved, []

    def begin(late):
        def listed(folder):
            looks.append(folder)
            return list_all(folder) if len(looks) > late else list_all(folder)[:-1]

        monkeypatch.setattr(folders, "once_saved", listed)
        return checkpoint

    monkeypatch.setattr(steps_of_all_hosts, "BETWEEN", 0.0)
    return begin


def test_rank_0_looks_again_until_it_lists_the_newest_checkpoint(stale):
    assert stale(late=2).load("latest", state(0, fill=0.0)).meta["step"] == 3


def test_an_older_checkpoint_than_another_host_has_is_refused(stale, tmp_path):
    text = f"rank 1 on host1 has the checkpoint of step 3 in {tmp_path}, which rank 0 on "
    with pytest.raises(CheckpointError, match=re.escape(text)):
        stale(late=10**6).load("latest", state(0, fill=0.0))


def test_what_another_host_can_list_and_not_open_does_not_count(tmp_path, monkeypatch):
    """Its listing may be the older one: of a branch that rank 0 has set aside."""
    checkpoint = opened(tmp_path)
    for step in (1, 2):
        save(checkpoint, step)
    (tmp_path / "step-00000002" / "MANIFEST.json").unlink()
    assert steps_of_all_hosts._newest(tmp_path) == 1


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_one_rank_of_each_host_lists_the_folder(tmp_path, monkeypatch, variable):
    """Every rank that srun had started did."""
    save(opened(tmp_path), 1)
    for local_rank, newest in (("0", 1), ("1", -1)):
        monkeypatch.setenv(variable, local_rank)
        assert steps_of_all_hosts._newest(tmp_path) == newest
