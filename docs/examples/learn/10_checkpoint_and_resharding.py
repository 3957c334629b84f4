"""Lesson 10: a checkpoint has no layout. Look at: one of tp 2 is resumed with pp 2, and by one process.

    python docs/examples/learn/10_checkpoint_and_resharding.py

It holds blocks of global tensors, each with its name and offset: weights and both moments; and the
position in the data. A load reads the blocks that *its* placements require, however tensors were sharded
when saved.
"""

import shutil
import tempfile
from pathlib import Path

from common import engine_of

from nanotrain_core.api import find_checkpoints, load_plugins
from nanotrain_core.testing import run_ranks

TP = ['parallel=[{use="tp"}]', "topology.tp=2", 'checkpoint={use="sharded_v2"}']
PP = ['schedule={use="1f1b"}', "topology.pp=2", 'checkpoint={use="sharded_v2"}']
ONE = ['checkpoint={use="sharded_v2"}']


def go_on(overrides, folder, steps, resume):
    """Train to step ``steps``; return the losses of this part."""
    engine, losses = engine_of(
        [*overrides, f"run.steps={steps}", "optimizer.lr_schedule.use='constant'"], Path(folder), resume
    )
    engine.fit()
    return losses


def main():
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = go_on(ONE, f"{folder}/one", 8, None)
        run_ranks(go_on, 2, TP, f"{folder}/two", 5, None)
        _, saved = find_checkpoints(Path(folder, "two"), load_plugins())[-1]
        tensors = saved.describe()["tensors"]
        print(f"saved by tp 2: {len(tensors)} tensors, among them")
        for name in ("layers.0.attn.q.weight", "exp_avg/layers.0.attn.q.weight"):
            print(f"  {name}: {tensors[name]['shape']}")
        for name, ranks, overrides in (("pp 2", 2, PP), ("one process", 1, ONE)):
            copy = shutil.copytree(f"{folder}/two", f"{folder}/{name}")
            losses = run_ranks(go_on, ranks, overrides, copy, 8, "latest")[0]
            worst = max(abs(a - b) for a, b in zip(losses, undisturbed[5:], strict=True))
            print(f"steps 6 to 8 over {name}: losses {'the same' if worst < 1e-12 else worst}")


if __name__ == "__main__":
    main()
