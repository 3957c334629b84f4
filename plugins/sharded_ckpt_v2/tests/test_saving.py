"""When checkpoints are saved, what appears when, what retention keeps, and what failures leave."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from nanotrain_sharded_ckpt_v2 import blocks, shard
from nanotrain_sharded_ckpt_v2.listing import list_checkpoints
from nanotrain_sharded_ckpt_v2.weights import open_weights
from safetensors.torch import load_file
from small_run import opened, reseal, save, state

from nanotrain_core.checkpoint.saver import CheckpointSaver
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError, SaveFailed


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def held(monkeypatch):
    """Hold writing threads back until the test lets them go."""
    gate = threading.Event()
    write = blocks.write

    def slow(path, tensors):
        assert gate.wait(10)
        return write(path, tensors)

    monkeypatch.setattr(blocks, "write", slow)
    return gate


def test_a_folder_that_another_format_wrote_is_not_listed_and_one_that_lost_its_manifest_is(tmp_path):
    checkpoint = opened(tmp_path)
    for step in (1, 2):
        save(checkpoint, step)
    (tmp_path / "step-00000002" / "MANIFEST.json").unlink()
    theirs = tmp_path / "step-00000003"
    theirs.mkdir()
    (theirs / "planes.z").touch()
    first, damaged = list_checkpoints(tmp_path)
    assert (first.step, first.verify()) == (1, [])
    assert damaged.step == 2
    assert damaged.verify()
    with pytest.raises(CheckpointError, match=r"step-00000002/MANIFEST\.json is missing"):
        open_weights(tmp_path)


def test_nothing_is_there_before_it_is_complete(tmp_path, held):
    checkpoint, live = opened(tmp_path), state(1)
    checkpoint.save(1, live)
    assert checkpoint.advance(wait=False) == ()
    assert checkpoint.steps() == []
    assert not (tmp_path / "latest").exists()
    checkpoint.settle()
    live.blocks[0].tensor.fill_(-1.0)  # training goes on
    held.set()
    (report,) = checkpoint.advance(wait=True)
    assert (report.step, report.path) == (1, tmp_path / "step-00000001")
    assert report.blocked <= report.seconds
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    assert (load_file(report.path / "shard-00000.safetensors")["w@0,0"] >= 100).all()


def test_an_update_waits_for_the_copy_and_nothing_else_does(tmp_path, monkeypatch, held):
    copy, gate = blocks._copy, threading.Event()

    def slow(target, tensor):
        assert gate.wait(10)
        copy(target, tensor)

    monkeypatch.setattr(blocks, "_copy", slow)
    checkpoint, live = opened(tmp_path), state(1)
    checkpoint.save(1, live)
    assert checkpoint.advance(wait=False) == ()
    with ThreadPoolExecutor(1) as beside:
        update = beside.submit(checkpoint.settle)
        with pytest.raises(TimeoutError):
            update.result(0.2)
        gate.set()
        update.result(10)  # though nothing is written yet
    held.set()
    (report,) = checkpoint.advance(wait=True)
    assert 0.2 <= report.blocked <= report.seconds


def test_no_memory_for_the_copy_is_a_failed_save(tmp_path, monkeypatch):
    def full(tensor):
        raise MemoryError("no room")

    monkeypatch.setattr(blocks, "_room", full)
    checkpoint = opened(tmp_path)
    checkpoint.save(1, state(1))
    checkpoint.settle()
    with pytest.raises(
        CheckpointError, match=r"the share of rank 0 of step 1 could not be written .* no room"
    ):
        checkpoint.advance(wait=True)
    assert names(tmp_path) == []


def test_a_write_that_fails_in_the_thread_leaves_nothing_and_the_next_succeeds(tmp_path, monkeypatch):
    checkpoint = opened(tmp_path)
    save(checkpoint, 1)

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "write", full)
        checkpoint.save(2, state(2))
        with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors of step 2 .* No space left"):
            checkpoint.advance(wait=True)
    assert names(tmp_path) == ["latest", "step-00000001"]
    save(checkpoint, 3)
    assert checkpoint.steps() == [1, 3]


def test_a_run_bears_two_failures_and_ends_with_the_third(tmp_path, monkeypatch):
    checkpoint, told, failed = opened(tmp_path), [], []
    saves = CheckpointSaver(checkpoint, told.append, failed.append)

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "write", full)
        for step in (1, 2):
            saves.begin(step, state(step))
            saves.advance(wait=True)
        with pytest.raises(SaveFailed, match="No space left on device; saves that failed in a row: 3"):
            saves.begin(3, state(3), last=True)
    saves.begin(4, state(4), last=True)
    assert [report.step for report in told] == [4]
    assert [(report.step, report.in_a_row) for report in failed] == [(1, 1), (2, 2), (3, 3)]


def test_the_last_save_may_not_fail(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "write", full)
    with pytest.raises(SaveFailed):
        CheckpointSaver(opened(tmp_path), print, print).begin(1, state(1), last=True)


def test_due_by_steps_and_by_minutes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    checkpoint = opened(tmp_path, every=4, every_minutes=1.0)
    assert [step for step in range(1, 10) if checkpoint.due(step)] == [4, 8]
    now[0] = 59.0
    assert not checkpoint.due(9)
    now[0] = 60.0
    assert checkpoint.due(9)
    save(checkpoint, 9)
    assert not checkpoint.due(10)
    assert not opened(tmp_path / "end").due(100)


def test_retention_keeps_the_newest_and_what_was_restored(tmp_path):
    checkpoint = opened(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(checkpoint, step)
    assert checkpoint.steps() == [2, 3]  # the one before the save is deleted once the next begins
    checkpoint.load("3", state(3))
    for step in (4, 5, 6):
        save(checkpoint, step)
    assert checkpoint.steps() == [3, 5, 6]


def test_retention_counts_sound_checkpoints_only_and_keeps_the_newest_verified(tmp_path):
    checkpoint = opened(tmp_path, keep=1)
    first = save(checkpoint, 1)
    broken = tmp_path / "step-00000002"
    broken.mkdir()
    (broken / "MANIFEST.json").write_text("{}")
    (tmp_path / "step-00000003").mkdir()  # no manifest: not a checkpoint
    checkpoint.save(4, state(4))
    assert first.exists()
    checkpoint.advance(wait=True)


def test_nothing_is_deleted_before_this_process_verified_one(tmp_path):
    writer = opened(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(writer, step)
    checkpoint = opened(tmp_path, keep=1)
    save(checkpoint, 4)
    assert checkpoint.steps() == [1, 2, 3, 4]
    save(checkpoint, 5)
    assert checkpoint.steps() == [4, 5]


def test_a_killed_save_is_cleared_away(tmp_path, held):
    checkpoint = opened(tmp_path)
    checkpoint.save(1, state(1))
    assert [name[:5] for name in names(tmp_path)] == [".tmp-"]
    held.set()
    checkpoint.advance(wait=True)
    (tmp_path / ".tmp-00000002-x").mkdir()
    (tmp_path / ".old-00000000-x").mkdir()
    opened(tmp_path)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_manifest_names_the_one_before_it(tmp_path):
    checkpoint = opened(tmp_path)
    first, second = (save(checkpoint, step) for step in (1, 2))
    sealed = (first / "MANIFEST.json").read_text().splitlines()[-2]
    assert f'"previous": {sealed.partition(": ")[2]},' in (second / "MANIFEST.json").read_text()


def test_every_dtype_comes_back(tmp_path):
    live = {str(dtype): torch.arange(8).to(dtype) for dtype in blocks.CODES}
    saved = [Block(name, (8,), (0,), tensor) for name, tensor in live.items()]
    checkpoint = opened(tmp_path)
    checkpoint.save(1, TrainState(saved, {}, {}))
    checkpoint.advance(wait=True)
    empty = [Block(name, (8,), (0,), torch.zeros_like(tensor)) for name, tensor in live.items()]
    checkpoint.load("latest", TrainState(empty, {}, {}))
    assert all(torch.equal(block.tensor.float(), live[block.name].float()) for block in empty)


def test_a_dtype_that_cannot_be_saved_is_named(tmp_path):
    odd = Block("odd", (2,), (0,), torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"odd is torch\.complex64, which cannot be saved"):
        opened(tmp_path).save(1, TrainState([odd], {}, {}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda block: Block("v", (4, 3), block.offset, block.tensor), "it has no tensor v"),
        (
            lambda block: Block("w", (5, 3), block.offset, block.tensor),
            r"w has shape \(4, 3\), expected \(5, 3\)",
        ),
        (
            lambda block: Block("w", (4, 3), block.offset, block.tensor.double()),
            "w is stored as F32, expected F64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_not_fallen_back_over(tmp_path, change, said):
    checkpoint = opened(tmp_path)
    save(checkpoint, 1)
    live = state(1)
    other = TrainState([change(live.blocks[0]), *live.blocks[1:]], {}, {})
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load("latest", other)
    assert checkpoint.steps() == [1]


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("exp_avg/v", "it holds exp_avg/v, which this run has no place for"),
        ("v", "it holds v, which this run has no place for"),
        ("exp_avg/", "it holds 'exp_avg' tensors, which this run has no place for"),
    ],
)
def test_what_no_rank_wants_is_refused_rather_than_lost_with_the_next_save(tmp_path, left, said):
    """Moments of a parameter that is trained no more were dropped without a word, if others had some."""
    checkpoint = opened(tmp_path)
    live = [Block(name, (2,), (0,), torch.zeros(2)) for name in ("v", "w", "exp_avg/v", "exp_avg/w")]
    checkpoint.save(1, TrainState(live, {}, {}))
    checkpoint.advance(wait=True)
    fewer = [b for b in live if b.name != left and not (left[-1] == "/" and b.name.startswith(left))]
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load("latest", TrainState(fewer, {}, {}))
    assert checkpoint.load("latest", TrainState(live, {}, {})) is not None


def test_a_state_that_changes_in_place_is_saved_as_it_was(tmp_path, held):
    """The manifest is written when all files are, some steps later."""
    checkpoint, live = opened(tmp_path), state(1)
    live = TrainState(live.blocks, {"step": 1, "monitors": {"Mine": {"losses": [1.0]}}}, live.rank_tensors)
    checkpoint.save(1, live)
    live.meta["monitors"]["Mine"]["losses"].append(2.0)
    held.set()
    checkpoint.advance(wait=True)
    found = checkpoint.load("latest", state(1))
    assert found.meta["monitors"] == {"Mine": {"losses": [1.0]}}


@pytest.mark.parametrize("way", ["absolute", "relative", "linked"])
def test_later_steps_are_left_behind_however_the_older_one_is_named(tmp_path, monkeypatch, way):
    """Else the next resume would go on with the branch that was left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    checkpoint = opened(tmp_path / "run" if way == "relative" else Path("run"), keep=9)
    for step in (1, 2, 3):
        save(checkpoint, step)
    start = {"absolute": tmp_path, "relative": Path("."), "linked": tmp_path / "link"}[way]
    checkpoint.load(str(start / "run/step-00000002"), state(2))
    assert checkpoint.steps() == [1, 2]


def test_retention_keeps_the_older_one_when_the_newest_was_damaged_since(tmp_path):
    checkpoint = opened(tmp_path, keep=1)
    for step in (1, 2):
        save(checkpoint, step)
    assert checkpoint.steps() == [1, 2]
    shard = tmp_path / "step-00000002/shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    save(checkpoint, 3)
    assert checkpoint.steps() == [1, 2, 3]
    save(checkpoint, 4)
    assert checkpoint.steps() == [3, 4]


def test_an_old_checkpoint_that_cannot_be_looked_at_harms_no_save(tmp_path, monkeypatch):
    """pytorch/torchtitan#909: a large run died of a rank that could not list what it was to delete."""
    checkpoint = opened(tmp_path, keep=1)
    for step in (1, 2):
        save(checkpoint, step)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("nanotrain_sharded_ckpt_v2.folders.steps", denied)
    monkeypatch.setattr(type(checkpoint), "steps", lambda self: [1, 2])
    save(checkpoint, 3)
    monkeypatch.undo()
    assert checkpoint.steps() == [1, 2, 3]


def test_a_checkpoint_of_a_later_version_is_refused_and_not_fallen_back_over(tmp_path):
    """It is whole: to go on from an older one would lose steps without need."""
    checkpoint = opened(tmp_path)
    save(checkpoint, 1)
    reseal(save(checkpoint, 2), lambda table: table.update(version=3))
    with pytest.raises(CheckpointError, match="version 3; expected 'nanotrain-sharded', version 2"):
        checkpoint.load("latest", state(2))
    assert checkpoint.steps() == [1, 2]


def test_latest_names_the_newest_that_is_left(tmp_path):
    checkpoint = opened(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(checkpoint, step)
    checkpoint.load("2", state(2))
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    (tmp_path / "step-00000002/shard-00000.safetensors").write_bytes(b"")
    checkpoint.load("latest", state(1))
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """It was set aside, and an older one was used."""
    checkpoint = opened(tmp_path)
    for step in (1, 2):
        save(checkpoint, step)
    fails, real = [OSError(errno.ESTALE, "Stale file handle")], shard.plain

    def plain(path):
        if fails:
            raise fails.pop()
        return real(path)

    monkeypatch.setattr(shard, "plain", plain)
    assert checkpoint.load("latest", state(0, fill=-1.0)).meta == {"step": 2}
    assert not fails
    assert not [*tmp_path.glob(".corrupt-*")]


@pytest.mark.parametrize("name", ["MANIFEST.json", "shard-00000.safetensors", "rank-00000.safetensors"])
def test_a_checkpoint_that_lost_a_file_is_damaged_and_not_taken_for_none(tmp_path, name):
    """Else a run of which it is the only one would begin anew."""
    checkpoint = opened(tmp_path)
    for step in (1, 2):
        path = save(checkpoint, step)
    (path / name).unlink()
    live = state(0, fill=-1.0)
    assert checkpoint.load("latest", live).meta == {"step": 1}
    assert [path.name[:17] for path in tmp_path.glob(".corrupt-*")] == [".corrupt-00000002"]
    (tmp_path / "step-00000001" / name).unlink()
    (told,) = list_checkpoints(tmp_path)
    assert f"step-00000001/{name} is missing" in told.verify()[0]
    with pytest.raises(CheckpointError, match=f"step-00000001/{name} is missing"):
        checkpoint.load("latest", live)
