"""A run of two tensors without an engine, for tests of the checkpoint alone."""

import json
from hashlib import sha256

import torch
from nanotrain_sharded_ckpt_v2 import ShardedConfig
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint

from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh


def opened(folder, **config):
    """Return a checkpoint of one rank, opened on ``folder``."""
    checkpoint = ShardedCheckpoint(ShardedConfig(**config))
    checkpoint.open(folder, Mesh(Layout({"dense": View(("dp",), (1,))})))
    return checkpoint


def state(step, fill=None):
    """Return a matrix in two blocks and a scalar, filled with numbers that tell the step."""
    whole = torch.arange(12.0).reshape(4, 3) + 100 * step if fill is None else torch.full((4, 3), fill)
    count = torch.tensor(float(step) if fill is None else fill)
    blocks = [Block("w", (4, 3), (0, 0), whole[:1].clone()), Block("w", (4, 3), (1, 0), whole[1:].clone())]
    return TrainState([*blocks, Block("step/w", (), (), count)], {"step": step}, {"torch": torch.arange(3)})


def save(checkpoint, step):
    """Save and publish ``step``."""
    checkpoint.save(step, state(step))
    return checkpoint.advance(wait=True)[0].path


def reseal(path, change):
    """Let ``change`` edit a manifest as a forger would, who can compute hashes too."""
    manifest = path / "MANIFEST.json"
    table = json.loads(manifest.read_text())
    del table["sha256"]
    change(table)
    body = json.dumps(table)[:-1]
    manifest.write_text(f'{body},\n"sha256": "{sha256(body.encode()).hexdigest()}"\n}}\n')
