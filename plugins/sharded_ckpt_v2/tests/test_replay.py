"""``nanotrain ckpt replay`` compares manifests, too: data position and history are in no other file."""

import argparse
import subprocess
from pathlib import Path

import pytest
import torch
from small_run import opened

from nanotrain_core.cli import replay
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.registry.registry import load_plugins


def save_all(folder, position):
    """Leave checkpoints of steps 1 and 2, the second at a position in the data."""
    checkpoint = opened(folder / "checkpoints")
    for step, at in ((1, 8), (2, position)):
        block = Block("w", (2,), (0,), torch.full((2,), float(step)))
        meta = {"step": step, "recipe": "", "data": {"position": at}}
        checkpoint.save(step, TrainState([block], meta, {}))
        checkpoint.advance(wait=True)


@pytest.mark.parametrize("step", [1, 2])
def test_a_damaged_checkpoint_is_refused_before_the_run_goes_on(tmp_path, monkeypatch, step):
    save_all(tmp_path / "run", position=16)
    (file,) = (tmp_path / "run" / f"checkpoints/step-0000000{step}").glob("shard-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def go_on(words, **options):
        raise AssertionError("it went on")

    monkeypatch.setattr(replay.subprocess, "run", go_on)
    args = argparse.Namespace(path=tmp_path / "run", step=None, plugin=[])
    with pytest.raises(CheckpointError, match=rf"step-0000000{step} is damaged: .*{file.name}"):
        replay.replay(args, load_plugins())


@pytest.mark.parametrize(("position", "code"), [(16, Exit.DONE), (24, Exit.FAILED)])
def test_a_run_that_goes_on_with_other_data_is_not_verified(tmp_path, monkeypatch, capsys, position, code):
    save_all(tmp_path / "run", position=16)

    def go_on(words, **options):
        save_all(Path(words[words.index("--folder") + 1]), position)
        return subprocess.CompletedProcess(words, Exit.DONE)

    monkeypatch.setattr(replay.subprocess, "run", go_on)
    args = argparse.Namespace(path=tmp_path / "run", step=None, plugin=[])
    assert replay.replay(args, load_plugins()) == code
    said = capsys.readouterr().out
    assert ("RESUME VERIFIED" in said, "other bytes in meta.data" in said) == (not code, bool(code))
