"""Checkpoints that were damaged and sealed again are refused by name, or as good as ever."""

import contextlib
import json
import re
import shutil
import time
from hashlib import sha256
from random import Random

import pytest
from damage import hurt, hurt_bytes, twice
from nanotrain_sharded_ckpt_v2.listing import list_checkpoints as list_sharded
from safetensors import safe_open
from safetensors.torch import save_file

from nanotrain_core.checkpoint.simple_damage import digest
from nanotrain_core.checkpoint.simple_listing import list_checkpoints as list_simple
from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

LISTS = {"simple": list_simple, "sharded_v2": list_sharded}
NAMES = {"simple": "step-00000001.safetensors", "sharded_v2": "step-00000001"}


@pytest.fixture(scope="module", params=list(LISTS))
def saved(request, tmp_path_factory):
    """Return the case, and the folder of a run that has saved step 1."""
    folder = tmp_path_factory.mktemp("saved")
    case = Case("checkpoint", use=request.param)
    make_engine(case, {"run": {"steps": 1}}, folder=folder).fit()
    return case, folder


# --- sealing again ----------------------------------------------------------------------------


def seal(folder, text):
    """Write a manifest that ends with the hash of what it says."""
    body = text.rstrip().removesuffix("}").rstrip()
    (folder / "MANIFEST.json").write_text(f'{body},\n"sha256": "{sha256(body.encode()).hexdigest()}"\n}}\n')


def damage_sharded(path, random):
    """Damage the manifest, or a header or the bytes of a file that the manifest then names rightly."""
    table = json.loads((path / "MANIFEST.json").read_text())
    del table["sha256"]
    what = random.randrange(10)
    if what == 0:
        seal(path, twice(json.dumps(table), random))
        return "a key twice"
    if what > 3:
        said = hurt(table, random)
        seal(path, json.dumps(table))
        return said
    name = random.choice(list(table["files"]))
    data = (path / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    said = "bytes"
    if what == 1:
        data = hurt_bytes(data, random)
    else:
        header = json.loads(data[8 : 8 + length])
        said = hurt(header, random)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (path / name).write_bytes(data)
    table["files"][name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    seal(path, json.dumps(table))
    return f"{name}: {said}"


def damage_simple(path, random):
    """Damage the state, the header around it, a tensor, or the bytes."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["nanotrain"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state, what, said = json.loads(header["state"]), random.randrange(10), ""
    if what == 0:
        path.write_bytes(hurt_bytes(path.read_bytes(), random))
        return "bytes"
    if what == 1:
        name = random.choice(list(tensors))
        how = random.choice((lambda t: t[:0], lambda t: t.double() * float("nan"), lambda t: t.flatten()[:1]))
        tensors[name] = how(tensors[name].reshape(-1)).contiguous()
        said = name
    text = json.dumps(state)
    if what == 2:
        text = twice(text, random)
    elif what > 3:
        said = hurt(state, random)
        text = json.dumps(state)
    header |= {"state": text, "sha256": digest(tensors.items(), text)}
    if what == 3:
        said = hurt(header, random)
    save_file(tensors, path, {"nanotrain": json.dumps(header)})
    return said


#: Whole, and not of this run: its model, data or optimizer are others, or it is none of a run at all.
OTHERS = ("another model", "other data", "does not fit this run", "a valid run state: KeyError('model')")
DAMAGE = {"simple": damage_simple, "sharded_v2": damage_sharded}


def change_state(path, use, change):
    """Let ``change`` change the state of a checkpoint, and seal it again."""
    if use == "simple":
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["nanotrain"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(state := json.loads(header["state"]))
        text = json.dumps(state)
        header |= {"state": text, "sha256": digest(tensors.items(), text)}
        save_file(tensors, path, {"nanotrain": json.dumps(header)})
    else:
        table = json.loads((path / "MANIFEST.json").read_text())
        del table["sha256"]
        change(table["meta"])
        seal(path, json.dumps(table))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("position", 9, "data.position is 9, but data.taken is "),
        ("position", None, "data of its state lacks 'position'"),
        ("position", "2", "data.position is '2', expected a number"),
        ("train", {}, "data.train is {}, expected a number"),
        ("fingerprint", 3, "data.fingerprint is 3, expected a text"),
        ("fingerprint", None, "data of its state lacks 'fingerprint'"),
    ],
)
def test_a_position_that_the_data_would_refuse_or_misread_is_told_by_verify(
    saved, tmp_path, key, value, said
):
    """Verified as whole, these stopped a resume, or trained on other data than the run's."""
    case, source = saved
    shutil.copytree(source, tmp_path / "run")
    path = tmp_path / "run/checkpoints" / NAMES[case.use]

    def change(meta):
        meta["data"][key] = value
        if value is None:
            del meta["data"][key]

    change_state(path, case.use, change)
    (listed,) = LISTS[case.use](tmp_path / "run")
    assert said in "; ".join(listed.verify())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("skipped_in_a_row", 2, "skipped_in_a_row of its state is 2, expected a number up to its step, 1"),
        ("skipped_in_a_row", True, "skipped_in_a_row of its state is True, expected a number"),
        ("save_pending", 1, "save_pending of its state is 1, expected true or false"),
        ("rollback", {"onset": 2, "reason": "", "agreed": False}, "expected an onset from 1 to its step, 1"),
        ("rollback", {"onset": 1, "reason": ""}, "expected a reason and whether it is agreed"),
        ("rollback", [1, ""], 'rollback of its state is [1, ""], expected an onset'),
    ],
)
def test_progress_that_the_step_contradicts_is_told_by_verify(saved, tmp_path, key, value, said):
    case, source = saved
    shutil.copytree(source, tmp_path / "run")
    path = tmp_path / "run/checkpoints" / NAMES[case.use]
    change_state(path, case.use, lambda meta: meta.update({key: value}))
    (listed,) = LISTS[case.use](tmp_path / "run")
    assert said in "; ".join(listed.verify())
    engine = make_engine(case, {"run": {"steps": 2}}, folder=tmp_path / "run", resume="latest")
    with pytest.raises(NanotrainError, match=re.escape(said)):
        engine.fit()


def entries(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if not path.is_relative_to(folder / "run")}


def look(case, folder, seed):
    """Damage a copy, and use it in all ways; return what was done, and whether it was refused."""
    random, use = Random(seed), case.use
    path = folder / "run/checkpoints" / NAMES[use]
    said = DAMAGE[use](path, random)
    before = entries(folder)
    (listed,) = LISTS[use](folder / "run")
    problems = listed.verify()
    with contextlib.suppress(NanotrainError):
        listed.describe()
    with contextlib.suppress(NanotrainError):
        open_weights(path, case.registry()).reader.damage()
    engine = make_engine(case, {"run": {"steps": 2}}, folder=folder / "run", resume="latest")
    try:
        engine.fit()
        refused = ""
    except NanotrainError as problem:
        refused = str(problem)
        assert problems or any(text in refused for text in OTHERS), (
            f"seed {seed}, {said}: verified as whole, and refused: {refused}"
        )
    assert entries(folder) == before
    if not refused:
        assert not problems, f"seed {seed}, {said}: trained on, though verify says {problems}"
        assert all(placed.parameter.isfinite().all() for placed in engine.run.placed)
    return said, refused


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 515), marks=pytest.mark.full)], ids=len)
def test_what_was_damaged_and_sealed_again_is_refused_or_whole(saved, tmp_path, seeds, monkeypatch):
    case, source = saved
    monkeypatch.chdir(tmp_path)
    refusals = 0
    for seed in seeds:
        folder = tmp_path / "one"
        shutil.copytree(source, folder / "run")
        began = time.monotonic()
        said, refused = look(case, folder, seed)
        assert time.monotonic() - began < 10, f"seed {seed}: {said}"
        refusals += bool(refused)
        shutil.rmtree(folder)
    assert refusals > len(seeds) / 2
