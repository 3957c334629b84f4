"""``python -m benchmarks.checkpoint``: what sharded checkpoints cost to plan, and what training waits for.

``plan``: DeepSeek-V3 (671B) on 2048 simulated ranks, pp 16 x dp 128 with ep 64, optimizer state cut into
a range of every parameter for every rank that holds it, which is the most boxes there can be. What rank 0
does is timed: unpickling what the ranks hold, sharing it out, checking it, writing the manifest.

``save``: one rank saves ``--mb`` of tensors at once, and beside training; next to it, plain ``write`` and
``fsync`` of as many bytes. Training is matrix products of one thread, with an update after each :data:`STEP`
seconds or so: ``blocked`` is what it waited for, ``delayed`` what the save cost it in all, sharing memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from nanotrain_sharded_ckpt_v2 import ShardedConfig
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint
from nanotrain_sharded_ckpt_v2.manifest import File, Manifest, shard_name, streams_name, write
from nanotrain_sharded_ckpt_v2.save_plan import BlockMetadata, make_plan

from nanotrain_core.checkpoint.tensor_boxes import boxes
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe import load_recipe
from nanotrain_core.registry.registry import load_plugins

PP, DP, EP = 16, 128, 64
STATE = ("master", "exp_avg", "exp_avg_sq")
#: Seconds of forward and backward between two updates.
STEP = 0.25
RECIPE = """
extends = "{fragment}"
[run]
steps = 1
[batch]
sequences = 1
microbatch = 1
length = 4096
[data]
use = "synthetic"
vocab = 64
"""


def shapes() -> list[list[tuple[str, tuple[int, ...], bool]]]:
    """Return, for each pipeline stage, name, shape and whether it is of experts, of every parameter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "v3.toml")
        path.write_text(RECIPE.format(fragment=Path("recipes/fragments/deepseek_v3.toml").resolve()))
        recipe = load_recipe(path)
    model = load_plugins().build(recipe.model)
    with torch.device("meta"):
        part = model.build(Part.whole(model.layers))
    experts = {name for name, _, tag in tagged(part) if tag.role is Role.EXPERTS}
    stages: list[list[tuple[str, tuple[int, ...], bool]]] = [[] for _ in range(PP)]
    for name, parameter in part.named_parameters():
        words = name.split(".")
        layer = int(words[1]) if words[0] == "layers" else (0 if words[0] == "embed" else model.layers - 1)
        of_experts = any(name.startswith(f"{prefix}.") for prefix in experts)
        stages[min(layer * PP // model.layers, PP - 1)].append((name, tuple(parameter.shape), of_experts))
    return stages


def holdings(stage: list[tuple[str, tuple[int, ...], bool]], dp: int) -> Iterator[BlockMetadata]:
    """Yield what one rank holds: bf16 weights, and its range of float32 state."""
    for name, whole, of_experts in stage:
        offset, shape, sharing, place = (0,) * len(whole), whole, DP, dp
        if of_experts:
            shape = (whole[0] // EP, *whole[1:])
            offset = (dp % EP * shape[0], *offset[1:])
            sharing, place = DP // EP, dp // EP
        yield name, "BF16", whole, offset, shape, False
        size = prod(shape)
        start, stop = size * place // sharing, size * (place + 1) // sharing
        for at, box in boxes(shape, start, stop):
            begin = tuple(a + b for a, b in zip(offset, at, strict=True))
            for kind in STATE:
                yield f"{kind}/{name}", "F32", whole, begin, box, False
        yield f"step/{name}", "F32", (), (), (), False


def plan() -> dict[str, float]:
    """Time what rank 0 does for one save whose plan is not known yet."""
    stages = shapes()
    sent = [pickle.dumps(list(holdings(stages[rank // DP], rank % DP))) for rank in range(PP * DP)]
    times = [time.perf_counter()]
    everyone = [pickle.loads(held) for held in sent]
    times.append(time.perf_counter())
    found = make_plan(everyone)
    times.append(time.perf_counter())
    files = {
        name(rank): File(10**10, "0" * 64) for rank in range(PP * DP) for name in (shard_name, streams_name)
    }
    manifest = Manifest(
        step=1,
        versions={},
        world_size=PP * DP,
        layout={"dense": {"pp": PP, "dp": DP}},
        previous=None,
        meta={},
        tensors=found.tensors,
        files=files,
    )
    text = write(manifest)
    times.append(time.perf_counter())
    names = ("receive_s", "share_out_s", "write_manifest_s")
    measured = {name: b - a for name, (a, b) in zip(names, pairwise(times), strict=True)}
    weights = sum(prod(shape) for stage in stages for _, shape, _ in stage)
    boxes_written = sum(len(tensor.chunks) for tensor in found.tensors.values())
    return measured | {
        "total_s": times[-1] - times[0],
        "parameters": weights,
        "held": sum(map(len, everyone)),
        "boxes": boxes_written,
        "received_mb": sum(map(len, sent)) / 1e6,
        "manifest_mb": len(text.encode()) / 1e6,
    }


# --- saving ---------------------------------------------------------------------------------------


def save(megabytes: int, rounds: int) -> dict[str, float]:
    """Time turns of a plain write, a save at once and one beside training; return medians and ratios."""
    torch.set_num_threads(1)
    train = training()
    tensors = [torch.randn(2**20) for _ in range(megabytes // 4)]
    blocks = [Block(f"t{number}", (2**20,), (0,), tensor) for number, tensor in enumerate(tensors)]
    state = TrainState(blocks, {}, {})
    size = sum(tensor.nbytes for tensor in tensors)
    found: dict[str, list[float]] = {"plain": [], "at_once": [], "blocked": [], "delayed": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        at_once, threaded = (opened(Path(folder, str(kind)), kind) for kind in (False, True))
        for step in range(1, rounds + 2):  # the first turn is left out: nothing is planned or allocated yet
            found["plain"].append(timed(lambda: plain(Path(folder, "plain"), tensors)))
            found["at_once"].append(timed(lambda step=step: run(at_once, step, state)))  # type: ignore[misc]
            alone = min(timed(train) for _ in range(3))
            began, steps = time.perf_counter(), 0
            threaded.save(step, state)
            while not (reports := threaded.advance(wait=False)):
                train()
                threaded.settle()
                steps += 1
            found["blocked"].append(reports[0].blocked)
            found["delayed"].append(time.perf_counter() - began - steps * alone)
    middle = {name: statistics.median(seconds[1:]) for name, seconds in found.items()}
    return {f"{name}_s": seconds for name, seconds in middle.items()} | {
        "gb_per_s": size / middle["at_once"] / 1e9,
        "throughput_of_plain": middle["plain"] / middle["at_once"],
        "blocked_of_at_once": middle["blocked"] / middle["at_once"],
        "delayed_of_at_once": middle["delayed"] / middle["at_once"],
    }


def training() -> Callable[[], None]:
    """Return what takes about :data:`STEP` seconds of one thread."""
    weights = torch.randn(1024, 1024)

    def products(number: int) -> None:
        for _ in range(number):
            torch.mm(weights, weights)

    products(10)
    return partial(products, max(1, round(STEP / (timed(partial(products, 10)) / 10))))


def opened(folder: Path, asynchronous: bool) -> ShardedCheckpoint:
    """Return a checkpoint of one rank."""
    checkpoint = ShardedCheckpoint(ShardedConfig(asynchronous=asynchronous, keep=1))
    checkpoint.open(folder, Mesh(Layout({"dense": View(("dp",), (1,))})))
    return checkpoint


def run(checkpoint: ShardedCheckpoint, step: int, state: TrainState) -> None:
    """Save to the end."""
    checkpoint.save(step, state)
    checkpoint.advance(wait=True)


def plain(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write the same bytes without a format."""
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that ``act`` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> int:
    """Measure, print JSON, and return 0 if every bar was passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("what", nargs="*", default=["plan", "save"], choices=["plan", "save"])
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    passed = True
    if "plan" in args.what:
        found = plan()
        passed &= found["total_s"] < 60
        print(json.dumps({"plan": found}, indent=2))
    if "save" in args.what:
        found = save(args.mb, args.rounds)
        passed &= found["throughput_of_plain"] >= 0.7 and found["blocked_of_at_once"] <= 0.1
        print(json.dumps({"save": found}, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
