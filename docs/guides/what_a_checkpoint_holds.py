"""The numbers of docs/guides/what_a_checkpoint_holds.md.

python docs/guides/what_a_checkpoint_holds.py
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from drawing import guide, rect, svg, text
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/learn"))

from common import engine_of

from nanotrain_core.testing import run_ranks

WEIGHT = "layers.0.attn.q.weight"
RECIPE = ['checkpoint={use="sharded_v2"}', "run.steps=2", 'precision={use="bf16"}']
TP = [*RECIPE, 'parallel=[{use="tp"}]', "topology.tp=2"]


def train(overrides, folder):
    """Train two steps of ``lesson.toml`` in bfloat16, and save."""
    engine, _ = engine_of(overrides, Path(folder))
    engine.fit()


def saved(folder):
    """Return the checkpoint of step 2 below a run folder, and its manifest."""
    checkpoint = Path(folder) / "checkpoints/step-00000002"
    return checkpoint, json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))


def by_kind(tensors):
    """Return of weights, masters and moments: how many tensors and bytes."""
    found = defaultdict(lambda: [0, 0])
    for name, tensor in tensors.items():
        kind, _, of = name.partition("/")
        numbers = 1
        for size in tensor["shape"]:
            numbers *= size
        found[kind if of else "weight"][0] += 1
        found[kind if of else "weight"][1] += numbers * {"BF16": 2, "F32": 4}[tensor["dtype"]]
    return found


def main():
    with tempfile.TemporaryDirectory() as folder:
        train(RECIPE, f"{folder}/one")
        run_ranks(train, 2, TP, f"{folder}/two")
        checkpoint, one = saved(f"{folder}/one")
        _, two = saved(f"{folder}/two")
        for file in sorted(checkpoint.iterdir()):
            print(file.name)
        parameters = by_kind(one["tensors"])["weight"][1] // 2
        print(f"\n{parameters:,} parameters")
        for kind, (count, size) in by_kind(one["tensors"]).items():
            print(f"{kind:11}{count} tensors, {size:>7,} bytes, {size / parameters:.2f} a parameter")
        position = one["meta"]["data"]
        print(f"\nstep {one['step']}, data position {position['position']}: {position['tokens']} tokens seen")
        for name, manifest in (("one process", one), ("tp 2", two)):
            tensor = manifest["tensors"][WEIGHT]
            print(f"{name}: {WEIGHT} {tensor['shape']}")
            for shard, offset, shape in tensor["chunks"]:
                print(f"  in shard {shard}: {shape} from {offset}")
        print(
            "the same names and shapes:",
            {k: v["shape"] for k, v in one["tensors"].items()}
            == {k: v["shape"] for k, v in two["tensors"].items()},
        )
        with safe_open(checkpoint / "shard-00000.safetensors", framework="pt") as file:
            master, weight = file.get_tensor(f"master/{WEIGHT}@0,0"), file.get_tensor(f"{WEIGHT}@0,0")
        print("the weight is its master, rounded:", bool((master.bfloat16() == weight).all()))


def pictures():
    parts = []
    for left, name, cuts in (
        (0, "saved by tp 2: boxes of two shards", ((0, 16), (16, 16))),
        (300, "read by pp 2: whole", ((0, 32),)),
        (540, "read by tp 4", ((0, 8), (8, 8), (16, 8), (24, 8))),
    ):
        parts.append(text(left, 14, name))
        for number, (first, rows) in enumerate(cuts):
            parts.append(rect(left, 24 + first * 4, 128, rows * 4 - 2, f"c{number}"))
            parts.append(
                text(
                    left + 64, 28 + (first + rows / 2) * 4, f"[{rows}, 32] from [{first}, 0]", "middle", "on"
                )
            )
    return {
        "what_a_checkpoint_holds": svg(
            760, 160, parts, "A weight [32, 32] in a checkpoint, and who reads which block"
        )
    }


if __name__ == "__main__":
    guide(main, pictures)
