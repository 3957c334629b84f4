"""A checkpoint of format version 2, kept as it was first written: every later version must read it.

Two ranks along dp saved the state of ``small_run.state(2)``, a share each. It is never to be written again.
"""

import json
import shutil
from pathlib import Path

import torch
from nanotrain_sharded_ckpt_v2.listing import list_checkpoints
from nanotrain_sharded_ckpt_v2.weights import open_weights
from small_run import opened, state

GOLDEN = Path(__file__).with_name("golden") / "step-00000002"


def test_loads_as_it_was_saved(tmp_path):
    live = state(2, fill=-1.0)
    found = opened(tmp_path).load(str(GOLDEN), live)
    assert found is not None
    assert found.meta == {"step": 2, "model": {"use": "tiny"}, "text": "ünïcode"}
    wanted = state(2)
    for block, expected in zip(live.blocks, wanted.blocks, strict=True):
        assert torch.equal(block.tensor, expected.tensor), block
    assert found.rank_tensors == {}  # it has those of two ranks


def test_is_listed_described_and_whole(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "checkpoints" / GOLDEN.name)
    (saved,) = list_checkpoints(tmp_path)
    described = saved.describe()
    assert (saved.step, described["version"], described["world_size"]) == (2, 2, 2)
    assert list(described["tensors"]) == ["step/w", "w"]
    assert saved.verify() == []


def test_its_weights_are_read_by_blocks():
    found = open_weights(GOLDEN)
    assert found is not None
    assert (found.model, found.reader.shapes) == ({"use": "tiny"}, {"w": (4, 3)})
    assert found.reader.dtypes == {"w": torch.float32}
    expected = torch.arange(12.0).reshape(4, 3) + 200
    assert torch.equal(found.reader.read("w", (slice(0, 3), slice(1, 3))), expected[:3, 1:])
    assert not found.reader.damage()


def test_has_not_been_touched():
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))
    assert manifest["sha256"] == "31fa35925332df9a5c271e797dcbd97afcf3a28f31766ef13a053b93592f75ef"
