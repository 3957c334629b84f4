"""A checkpoint that a stranger forged, hashes and all, is refused by name; nothing runs or changes."""

import json
import os
import pickle
from hashlib import sha256

import pytest
import torch
from nanotrain_sharded_ckpt_v2.listing import list_checkpoints
from safetensors.torch import save as serialize
from small_run import opened, reseal, save, state

from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

SHARD = "shard-00000.safetensors"


#: A tensor without numbers, at the end of the shard.
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [52, 52]}


class Payload:
    """Leaves a file where a pickle of it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def forge(path, name, data):
    """Replace a file and its entry in the manifest."""
    (path / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    reseal(path, lambda table: table["files"].__setitem__(name, entry))


def header(path, change):
    """Rewrite the header of the shard."""
    data = (path / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    forge(path, SHARD, len(text).to_bytes(8, "little") + text + data[8 + length :])


def streams(**changes):
    """Replace the file of random-number streams."""
    return lambda path: forge(path, "rank-00000.safetensors", serialize(changes))


def rename(name):
    def change(table):
        table["files"][name] = table["files"].pop(SHARD)

    return lambda path: reseal(path, change)


def tensor(**changes):
    return lambda path: reseal(path, lambda table: table["tensors"]["w"].update(changes))


def set_to(key, value):
    return lambda path: reseal(path, lambda table: table.__setitem__(key, value))


def link(name):
    def change(path):
        elsewhere = path.parent / "elsewhere"
        (path / name).rename(elsewhere)
        (path / name).symlink_to(elsewhere)

    return change


def write(name, data):
    return lambda path: (path / name).write_bytes(data)


def truncate(path):
    manifest = path / "MANIFEST.json"
    manifest.write_text(manifest.read_text()[:200])


def key_twice(path):
    """Seal a manifest that readers understand differently: some take the first, some the last."""
    manifest = path / "MANIFEST.json"
    body = manifest.read_text().rpartition(',\n"sha256"')[0].replace("{", '{"step": 1, ', 1)
    manifest.write_text(f'{body},\n"sha256": "{sha256(body.encode()).hexdigest()}"\n}}\n')


FORGERIES = {
    "path_traversal": (rename("../../evil.safetensors"), "'../../evil.safetensors'; expected a plain name"),
    "absolute_name": (rename("/etc/evil.safetensors"), "'/etc/evil.safetensors'; expected a plain name"),
    "folder_in_name": (rename("a/evil.safetensors"), "expected a plain name"),
    "hidden_name": (rename(".evil.safetensors"), "expected a plain name"),
    "line_break_in_name": (rename("evil\n.safetensors"), "expected a plain name"),
    "not_safetensors": (rename("evil.pt"), "ends with .safetensors"),
    "linked_shard": (link(SHARD), f"{SHARD} is missing, or is no plain file"),
    "linked_manifest": (link("MANIFEST.json"), "MANIFEST.json is missing, or is no plain file"),
    "pickle_as_shard": (lambda path: forge(path, SHARD, pickle.dumps(Payload())), "is no safetensors file"),
    "pickle_beside": (write(".metadata", pickle.dumps(Payload())), "holds '.metadata', which its manifest"),
    "stale_shard": (write("shard-00007.safetensors", b""), "holds 'shard-00007.safetensors', which"),
    "huge_header": (
        lambda path: forge(path, SHARD, (2**50).to_bytes(8, "little") + b"{}"),
        "its header claims 1125899906842624 bytes",
    ),
    "truncated_json": (truncate, "MANIFEST.json is damaged: its last line"),
    "no_json": (write("MANIFEST.json", b"\xff\xfe"), "MANIFEST.json is damaged"),
    "layout_of_text": (set_to("layout", {"dense": "dp"}), "layout.dense is no table"),
    "layout_without_sizes": (set_to("layout", {"dense": {"dp": "2"}}), "layout.dense.dp is '2', expected a"),
    "nested_json": (set_to("layout", json.loads("[" * 900 + "]" * 900)), "layout is no table"),
    "other_version": (set_to("version", 3), "version 3; expected 'nanotrain-sharded', version 2"),
    "other_format": (set_to("format", "x"), "is of format 'x'"),
    "other_step": (set_to("step", 7), "its state is that of step 1, not 7"),
    "step_no_number": (set_to("step", "1"), "step is '1', expected a number"),
    "no_tensors": (lambda path: reseal(path, lambda table: table.pop("tensors")), "it lacks 'tensors'"),
    "unknown_dtype": (tensor(dtype="F128"), "w is stored as 'F128'; known are"),
    "other_step_of_the_state": (set_to("meta", {"step": 7}), "its state is that of step 7, not 1"),
    "key_twice": (key_twice, "the key 'step' is duplicated"),
    "other_number_of_ranks": (set_to("world_size", 2), "layout.dense has 1 ranks, but world_size is 2"),
    "file_of_nothing": (
        lambda path: forge(path, "more.safetensors", serialize({"w": torch.zeros(1)})),
        "it names more.safetensors, in which no tensor and no rank's streams are",
    ),
    "header_with_a_gap": (
        lambda path: header(path, lambda table: table["w@1,0"].update(data_offsets=[0, 36])),
        "is no safetensors file",
    ),
    "wrong_dtype": (tensor(dtype="I32"), "w is stored as I32, expected F32"),
    "wrong_shape": (tensor(shape=[3, 4]), "is outside of (3, 4)"),
    "negative_shape": (tensor(shape=[-4, 3]), "shape of w is -4"),
    "truth_as_number": (tensor(shape=[True, 3]), "shape of w is True"),
    "hole": (tensor(chunks=[[0, [0, 0], [1, 3]]]), "its blocks hold 3 numbers, but (4, 3) has 12"),
    "overlap": (tensor(chunks=[[0, [0, 0], [2, 3]], [0, [1, 0], [2, 3]]]), "at (0, 0) and (1, 0) overlap"),
    "nothing": (tensor(chunks=[]), "no block of it exists"),
    "shard_without_file": (tensor(chunks=[[9, [0, 0], [4, 3]]]), "shard-00009.safetensors, which is not"),
    "header_with_other_dtype": (
        lambda path: header(path, lambda table: table["w@0,0"].update(dtype="I32")),
        "w@0,0 is I32 (1, 3) there, F32 (1, 3) in the manifest",
    ),
    "stream_of_other_size": (
        streams(torch=torch.zeros(2, dtype=torch.int64)),
        "torch is (torch.int64, (2,)), expected (torch.int64, (3,))",
    ),
    "stream_of_other_dtype": (streams(torch=torch.zeros(3)), "torch is (torch.float32, (3,)), expected"),
    "pickle_as_stream": (
        lambda path: forge(path, "rank-00000.safetensors", pickle.dumps(Payload())),
        "rank-00000.safetensors is no safetensors file",
    ),
    "header_with_more": (
        lambda path: header(path, lambda table: table.update(x=EMPTY)),
        "holds x, which is not in the manifest",
    ),
}


@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_checkpoint_is_refused(tmp_path, monkeypatch, forgery, verify):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").write_text("untouched")
    checkpoint = opened(tmp_path / "run", verify=verify)
    forge_it, said = FORGERIES[forgery]
    forge_it(save(checkpoint, 1))
    live = state(1, fill=-1.0)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load("1", live)
    assert said in str(refused.value)
    assert all((block.tensor == -1.0).all() for block in live.blocks)
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "run"}
    assert (tmp_path / "victim").read_text() == "untouched"


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    checkpoint = opened(tmp_path)
    path = save(checkpoint, 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        checkpoint.load("1", state(1))


def test_a_manifest_too_large_is_not_read(tmp_path, monkeypatch):
    checkpoint = opened(tmp_path)
    save(checkpoint, 1)
    monkeypatch.setattr("nanotrain_sharded_ckpt_v2.manifest.LARGEST", 100)
    with pytest.raises(CheckpointError, match="at most 100 are read"):
        checkpoint.load("1", state(1))


FORGED_META = {
    "no_model": lambda meta: meta.pop("model"),
    "no_step": lambda meta: meta.pop("step"),
    "step_of_a_list": lambda meta: meta.update(step=[3]),
    "no_data": lambda meta: meta.pop("data"),
    "data_without_position": lambda meta: meta["data"].pop("position"),
    "sizes_of_words": lambda meta: meta["data"].update(batch_sizes=["ab"]),
    "position_below_0": lambda meta: meta["data"].update(position=-1),
    "infinite_position": lambda meta: meta["data"].update(position=float("inf")),
    "skipped_for_ever": lambda meta: meta["data"].update(skipped=[[8, 2**52]]),
    "skipped_backwards": lambda meta: meta["data"].update(skipped=[[9, 8]]),
    "taken_by_more_steps": lambda meta: meta["data"].update(taken=16),
    "batches_of_nothing": lambda meta: meta["data"].update(batch_sizes=[[0, 0]]),
    "scale_of_nan": lambda meta: meta.update(loss_scale={"value": float("nan")}),
    "model_as_text": lambda meta: meta.update(model="transformer"),
}


@pytest.mark.parametrize("forgery", FORGED_META)
def test_a_forged_state_is_refused(tmp_path, forgery):
    case = Case("checkpoint", use="sharded_v2")
    make_engine(case, {"run": {"steps": 1}}, folder=tmp_path).fit()
    path = tmp_path / "checkpoints/step-00000001"
    reseal(path, lambda table: FORGED_META[forgery](table["meta"]))
    engine = make_engine(case, {"run": {"steps": 2}}, folder=tmp_path, resume="latest")
    before = [placed.parameter.detach().clone() for placed in engine.run.placed]
    with pytest.raises(CheckpointError, match=r"not contain a valid run state|no checkpoint in .* is whole"):
        engine.fit()
    if forgery != "data_without_position":  # which the data component alone knows
        (saved,) = list_checkpoints(tmp_path)
        assert "MANIFEST.json is damaged" in saved.verify()[0]
    assert all(torch.equal(p.parameter, old) for p, old in zip(engine.run.placed, before, strict=True))
