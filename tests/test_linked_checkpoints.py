"""Checkpoints that share files of frozen weights have every tensor that one written whole has."""

import json
import os
from itertools import pairwise

import attrs
import pytest
import torch
from compositions import OPTIMIZERS
from safetensors.torch import load_file
from test_lora_layouts import PLAIN, with_lora
from test_qlora_layouts import case_of, in_shards, with_fsdp2

from nanotrain_core.contracts import Monitor
from nanotrain_core.precision.quantized_storage import dequantize
from nanotrain_core.run.stop import Rollback
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import make_engine


def lora(layout):
    case = with_lora(attrs.evolve(PLAIN, **layout))
    precision = {"use": "bf16"}
    return attrs.evolve(case, overrides={**case.overrides, "precision": precision})


PRECISIONS = {"lora": lora, "qlora": case_of}


class GoBack(Monitor):
    """Asks once, at a step, to go back to two before it, of which a later checkpoint is there already."""

    def __init__(self, engine, step):
        self.engine, self.step = engine, step

    def on_step(self, report):
        if report.step == self.step:
            self.step = 0
            return Rollback(report.step - 1, "a test")
        return None


def trained(case, folder, steps, *, linked, resume=None, back_at=0):
    """Train, saving after each step; return the names of this rank's frozen parameters."""
    checkpoint = {"use": "sharded_v2", "every": 1, "keep": 9, "link_frozen": linked}
    changes = {"run": {"steps": steps}, "checkpoint": checkpoint, "optimizer": OPTIMIZERS["adamw"]}
    engine = make_engine(case, changes, folder=folder, resume=resume)
    engine.events.monitors = [*engine.events.monitors, GoBack(engine, back_at)]
    engine.fit()
    return engine.run.frozen


def tensors_of(path):
    """Return a checkpoint's whole tensors, from its own files alone."""
    found = {}
    files = {each.name: load_file(each) for each in path.glob("shard-*")}
    for name, entry in json.loads((path / "MANIFEST.json").read_text())["tensors"].items():
        boxes = []
        for number, offset, shape in entry["chunks"]:
            box = files[f"shard-{number:05d}.safetensors"][f"{name}@{','.join(map(str, offset))}"]
            boxes.append((offset, shape, box))
        whole = torch.empty(entry["shape"], dtype=boxes[0][2].dtype)
        for offset, shape, box in boxes:
            whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = box
        found[name] = whole
    return found


def shared(path, other):
    """Return which files two checkpoints share."""
    names = (each.name for each in path.iterdir() if (other / each.name).exists())
    return sorted(name for name in names if os.path.samefile(path / name, other / name))


def steps_in(folder):
    return sorted((folder / "checkpoints").glob("step-*"))


def assert_equal_to_whole(linked, whole, ranks, *, written=()):
    """Compare all checkpoints of two runs; ``written``: steps that had nothing to link."""
    paths, others = steps_in(linked), steps_in(whole)
    assert [path.name for path in paths] == [path.name for path in others]
    for before, path, other in zip([None, *paths], paths, others, strict=False):
        assert_bitwise(tensors_of(path), tensors_of(other), path.name)
        if before is not None and int(path.name[5:]) not in written:
            assert shared(before, path) == [f"shard-{ranks + n:05d}.safetensors" for n in range(ranks)]
        elif before is not None:
            assert shared(before, path) == []
    for before, path in pairwise(others):
        assert shared(before, path) == []


LAYOUTS = [{"tp": 2}, {"dp": 2}, {"pp": 2, "schedule": "1f1b"}]
MORE = [
    {"model": "deepseek_v3", "dp": 2, "ep": 2},  # whose routers' biases are no weights, and change
    {"model": "moe", "dp": 2, "ep": 2},
    {"dp": 2, "zero": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tensor_is_that_of_a_checkpoint_written_whole(tmp_path, precision, layout):
    """After training, after a resume, and after a resume on another layout, which finds nothing to link."""
    case, folders = PRECISIONS[precision](layout), (tmp_path / "linked", tmp_path / "whole")
    for folder in folders:
        frozen = run_ranks(trained, 2, case, folder, 3, linked=folder == folders[0])
    assert_equal_to_whole(*folders, 2)
    weights = {name for name in tensors_of(steps_in(folders[0])[0]) if "/" not in name}
    assert weights - set().union(*frozen) == {
        name for name in weights if ".lora_" in name or ".router." in name
    }
    for folder in folders:
        run_ranks(trained, 2, case, folder, 5, linked=folder == folders[0], resume="3")
    assert_equal_to_whole(*folders, 2)
    if "ep" in layout:
        return
    for folder in folders:
        run_ranks(trained, 1, case.alone(), folder, 7, linked=folder == folders[0], resume="4")
    paths = steps_in(folders[0])
    assert shared(paths[3], paths[4]) == []
    assert shared(paths[4], paths[5]) == ["shard-00001.safetensors"]
    for path, other in zip(paths, steps_in(folders[1]), strict=True):
        assert_bitwise(tensors_of(path), tensors_of(other), path.name)


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_after_a_rollback_too(tmp_path, precision):
    case, folders = PRECISIONS[precision]({"dp": 2}), (tmp_path / "linked", tmp_path / "whole")
    for folder in folders:
        run_ranks(trained, 2, case, folder, 6, linked=folder == folders[0], back_at=4)
        assert [*(folder / "checkpoints").glob("superseded-*/*")]
    assert_equal_to_whole(*folders, 2)


def lora_in_shards(layout):
    return with_fsdp2(lora(layout))


@pytest.mark.full
@pytest.mark.parametrize("sharded", [lora_in_shards, in_shards])
def test_shards_of_fsdp2_too(tmp_path, sharded):
    """Those of plain weights, and of packed ones."""
    case, folders = sharded({"dp": 2}), (tmp_path / "linked", tmp_path / "whole")
    for folder in folders:
        run_ranks(trained, 2, case, folder, 3, linked=folder == folders[0])
    for folder in folders:
        run_ranks(trained, 2, case, folder, 5, linked=folder == folders[0], resume="3")
    assert_equal_to_whole(*folders, 2)


class WritesTo(Monitor):
    """Writes to all frozen weights once, after a step, as one that merges adapters does."""

    def __init__(self, engine, step):
        self.engine, self.step = engine, step

    @torch.no_grad()
    def on_step(self, report):
        for placed in self.engine.run.placed if report.step == self.step else ():
            if placed.placement.name in self.engine.run.frozen:
                placed.parameter.mul_(2.0)


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_written_to_by_operations_of_torch_are_saved_anew(tmp_path, precision):
    checkpoint = {"use": "sharded_v2", "every": 1, "keep": 9}
    engine = make_engine(
        PRECISIONS[precision]({}), {"run": {"steps": 4}, "checkpoint": checkpoint}, folder=tmp_path
    )
    engine.events.monitors = [*engine.events.monitors, WritesTo(engine, 2)]
    engine.fit()
    paths, frozen = steps_in(tmp_path), engine.run.frozen
    assert [bool(shared(*pair)) for pair in pairwise(paths)].count(False) == 1
    first, last = tensors_of(paths[0]), tensors_of(paths[-1])
    live = {p.placement.name: dequantize(p.parameter) for p in engine.run.placed}
    assert_bitwise({name: last[name] for name in frozen}, {name: live[name] for name in frozen}, "saved")
    assert not [name for name in frozen if first[name].any() and torch.equal(first[name], last[name])]


@pytest.mark.full
def test_weights_of_a_router_and_what_a_model_builds_frozen_count_as_changing():
    """Biases follow the load of experts, by ``balance``, which may change whatever a router has."""
    case = lora({"model": "deepseek_v3"})
    run = make_engine(case, {}).run
    frozen = {p.placement.name for p in run.placed if not p.parameter.requires_grad}
    assert {name for name in frozen - run.frozen if name.endswith("router.bias")}
    assert frozen - run.frozen == {name for name in frozen if ".router." in name}
