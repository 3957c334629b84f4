"""Frozen weights are written once, and every checkpoint has them as they were when it was saved."""

import errno
import os
import shutil
from functools import partial

import pytest
import torch
from nanotrain_sharded_ckpt_v2 import blocks, frozen_files
from nanotrain_sharded_ckpt_v2.listing import list_checkpoints
from small_run import opened

from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.disaster import end_of_child, kill_at

FROZEN = "shard-00001.safetensors"  # after the shard of the only rank


class Run:
    """A frozen matrix in two blocks, and an adapter."""

    def __init__(self, fill=None):
        self.matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        self.adapter = torch.zeros(2)
        if fill is not None:
            self.matrix.fill_(fill)

    def state(self, step=0):
        self.adapter.fill_(step)
        parts = [Block("w", (4, 3), (at, 0), self.matrix.detach()[at : at + 2], frozen=True) for at in (0, 2)]
        return TrainState([*parts, Block("a", (2,), (0,), self.adapter)], {"step": step}, {})

    def save(self, checkpoint, step):
        checkpoint.save(step, self.state(step))
        checkpoint.settle()
        return checkpoint.advance(wait=True)[0].path


def is_linked(path, other):
    return os.path.samefile(path / FROZEN, other / FROZEN)


def assert_has(path, step, matrix):
    """Check a checkpoint by itself, whatever became of others."""
    (listed,) = list_checkpoints(path)
    assert listed.verify() == []
    back = Run(fill=-1.0)
    found = opened(path.parent / "elsewhere").load(str(path), back.state(-1))
    assert found.meta == {"step": step}
    assert torch.equal(back.matrix, matrix)
    assert torch.equal(back.adapter, torch.full((2,), float(step)))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_later_saves_write_what_is_trained_and_each_checkpoint_stands_alone(
    tmp_path, monkeypatch, asynchronous
):
    written, write = [], blocks.write
    monkeypatch.setattr(blocks, "write", lambda path, them: (written.append(path.name), write(path, them))[1])
    checkpoint, run = opened(tmp_path, keep=9, asynchronous=asynchronous), Run()
    paths = [run.save(checkpoint, step) for step in (1, 2, 3)]
    assert written == ["shard-00000.safetensors", FROZEN, *["shard-00000.safetensors"] * 2]
    assert is_linked(paths[0], paths[1])
    assert is_linked(paths[1], paths[2])
    assert_has(paths[1], 2, run.matrix)
    for path in paths[:2]:
        shutil.rmtree(path)
    assert_has(paths[2], 3, run.matrix)


def test_a_copy_in_memory_has_no_frozen_weights_once_they_are_written(tmp_path):
    checkpoint, run = opened(tmp_path), Run()
    run.save(checkpoint, 1)
    assert {*checkpoint._copies._kept} == {"w@0,0", "w@2,0", "a@0"}
    run.save(checkpoint, 2)
    assert {*checkpoint._copies._kept} == {"a@0"}


def test_retention_deletes_old_ones_and_new_ones_stay_whole(tmp_path):
    checkpoint, run = opened(tmp_path, keep=1), Run()
    paths = [run.save(checkpoint, step) for step in range(1, 6)]
    assert checkpoint.steps() == [4, 5]
    assert_has(paths[-1], 5, run.matrix)
    assert os.stat(paths[-1] / FROZEN).st_nlink == 2


def test_weights_that_were_written_to_are_saved_as_they_are(tmp_path):
    """Whoever froze them may change them all the same, such as by adding adapters to them."""
    checkpoint, run = opened(tmp_path, keep=9), Run()
    first = run.save(checkpoint, 1)
    before = run.matrix.clone()
    run.matrix[3].add_(1.0)
    second, third = (run.save(checkpoint, step) for step in (2, 3))
    assert not is_linked(first, second)
    assert is_linked(second, third)
    assert_has(first, 1, before)
    assert_has(third, 3, run.matrix)


def test_weights_of_another_run_that_were_loaded_are_saved(tmp_path):
    other = Run(fill=7.0)
    elsewhere = other.save(opened(tmp_path / "other"), 9)
    checkpoint, run = opened(tmp_path / "run", keep=9), Run()
    first = run.save(checkpoint, 1)
    checkpoint.load(str(elsewhere), run.state())
    second = run.save(checkpoint, 10)
    aside = next((tmp_path / "run").glob("superseded-*")) / first.name
    assert not is_linked(aside, second)
    assert not is_linked(elsewhere, second)
    assert_has(second, 10, other.matrix)


@pytest.mark.parametrize(("verify", "linked"), [("full", True), ("size", False), ("none", False)])
def test_a_resumed_run_links_what_it_has_verified(tmp_path, verify, linked):
    first = Run().save(opened(tmp_path, keep=9), 1)
    checkpoint, run = opened(tmp_path, keep=9, verify=verify), Run(fill=-1.0)
    checkpoint.load("latest", run.state())
    second = run.save(checkpoint, 2)
    assert is_linked(first, second) == linked
    assert_has(second, 2, Run().matrix)


def test_after_a_rollback_the_older_one_is_linked(tmp_path):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    first, _ = (run.save(checkpoint, step) for step in (1, 2))
    checkpoint.load("1", run.state())
    again = run.save(checkpoint, 2)
    assert is_linked(first, again)
    assert_has(again, 2, run.matrix)


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "more", "fewer"])
def test_a_file_of_other_boxes_is_not_linked(tmp_path, change):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    first = run.save(checkpoint, 1)
    state = run.state(2)
    top, bottom, adapter = state.blocks
    wanted = {
        "shape": [Block("w", (4, 3), (0, 0), run.matrix, frozen=True)],
        "dtype": [Block("w", (4, 3), b.offset, b.tensor.double(), frozen=True) for b in (top, bottom)],
        "name": [Block("v", (4, 3), b.offset, b.tensor, frozen=True) for b in (top, bottom)],
        "more": [top, bottom, Block("v", (2,), (0,), torch.ones(2), frozen=True)],
        "fewer": [Block("w", (2, 3), (0, 0), top.tensor, frozen=True)],
    }[change]
    checkpoint.save(2, TrainState([*wanted, adapter], {"step": 2}, {}))
    second = checkpoint.advance(wait=True)[0].path
    assert not is_linked(first, second)
    empty = [Block(b.name, b.global_shape, b.offset, torch.zeros_like(b.tensor)) for b in wanted]
    opened(tmp_path / "else").load(
        str(second), TrainState([*empty, Block("a", (2,), (0,), adapter.tensor)], {}, {})
    )
    assert all(torch.equal(got.tensor, block.tensor) for got, block in zip(empty, wanted, strict=True))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_without_hard_links_every_save_is_whole_and_a_warning_says_so_once(
    tmp_path, monkeypatch, capsys, code
):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    checkpoint, run = opened(tmp_path, keep=9), Run()
    paths = [run.save(checkpoint, step) for step in (1, 2, 3)]
    assert not is_linked(paths[1], paths[2])
    assert_has(paths[2], 3, run.matrix)
    said = capsys.readouterr()
    assert (said.out + said.err).count("frozen weights are written again") == 1


def flip(path):
    data = bytearray((path / FROZEN).read_bytes())
    data[-1] ^= 1
    (path / FROZEN).write_bytes(data)
    later = (path / FROZEN).stat().st_mtime_ns + 10**7  # than a file system's clock may show
    os.utime(path / FROZEN, ns=(later, later))


def cut(path):
    os.truncate(path / FROZEN, 9)


def rename(path):
    path.rename(path.with_name(".corrupt-00000002"))


@pytest.mark.parametrize("harm", [flip, cut, rename, shutil.rmtree, lambda path: (path / FROZEN).unlink()])
def test_after_damage_the_next_save_has_them_from_memory(tmp_path, harm):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    second = [run.save(checkpoint, step) for step in (1, 2)][-1]
    harm(second)
    third, fourth = (run.save(checkpoint, step) for step in (3, 4))
    assert is_linked(third, fourth)
    assert_has(third, 3, run.matrix)
    assert_has(fourth, 4, run.matrix)


def test_after_verify_has_found_damage_that_the_file_system_does_not_show(tmp_path):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    path = run.save(checkpoint, 1)
    before = (path / FROZEN).stat()
    flip(path)
    os.utime(path / FROZEN, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "SHA-256" in checkpoint.verify(1)[0]
    assert_has(run.save(checkpoint, 2), 2, run.matrix)


def test_what_is_damaged_is_damaged_wherever_it_is_linked_and_a_resume_says_so(tmp_path):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    path = [run.save(checkpoint, step) for step in (1, 2)][-1]
    flip(path)
    assert [bool(checkpoint.verify(step)) for step in (1, 2)] == [True, True]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        opened(tmp_path).load("latest", run.state())


def test_once_a_day_they_are_written_anew(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    checkpoint, run, paths = opened(tmp_path, keep=9), Run(), []
    for step, hour in enumerate((0, 10, 20, 30, 40, 50)):
        now[0] = 3600.0 * hour
        paths.append(run.save(checkpoint, step))
    files = [os.stat(path / FROZEN).st_ino for path in paths]
    assert [files.index(each) for each in files] == [0, 0, 0, 3, 3, 3]
    assert frozen_files.LONGEST == 24 * 3600


def test_on_demand_every_checkpoint_is_whole_in_one_file_of_a_rank(tmp_path):
    checkpoint, run = opened(tmp_path, keep=9, link_frozen=False), Run()
    for step in (1, 2):
        path = run.save(checkpoint, step)
    assert not (path / FROZEN).exists()
    assert_has(path, 2, run.matrix)


def test_a_failed_save_leaves_the_last_one_to_link(tmp_path, monkeypatch):
    checkpoint, run = opened(tmp_path, keep=9), Run()
    first = run.save(checkpoint, 1)

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "write", full)
        checkpoint.save(2, run.state(2))
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.advance(wait=True)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]
    third = run.save(checkpoint, 3)
    assert is_linked(first, third)
    assert_has(first, 1, run.matrix)


def link_while_one_is_deleted(folder, number):
    """Of steps 1 and 2, the save of step 3 links the file of 2 and deletes 1."""
    checkpoint, run = opened(folder, keep=1), Run()
    for step in (1, 2):
        run.save(checkpoint, step)
    kill_at(number)
    run.save(checkpoint, 3)


@pytest.mark.full
def test_killed_at_any_write_all_that_is_there_is_whole(tmp_path):
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        end = end_of_child(partial(link_while_one_is_deleted, folder, number))
        assert end in ("killed", "done")
        again, live = opened(folder), Run(fill=-1.0)  # as the next launch does
        assert not list(folder.glob(".tmp-*")) + list(folder.glob(".old-*")), f"at write {number}"
        there = again.steps()
        assert there in ([1, 2], [2], [2, 3]), f"at write {number}"
        assert again.load("latest", live.state()).meta == {"step": there[-1]}
        assert_has(live.save(again, 4), 4, Run().matrix)
        for step in there:
            assert_has(folder / f"step-{step:08d}", step, Run().matrix)
        if end == "done":
            break
    assert number > 20
