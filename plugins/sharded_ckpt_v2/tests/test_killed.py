"""SIGKILL at every write, also where others are deleted or moved: what was there stays whole."""

import shutil
from functools import partial

import pytest
from small_run import opened, save, state

from nanotrain_core.testing.disaster import end_of_child, kill_at


def save_while_one_is_deleted(folder, number):
    """Of steps 1 and 2, the save of step 3 deletes 1."""
    checkpoint = opened(folder, keep=1)
    for step in (1, 2):
        save(checkpoint, step)
    kill_at(number)
    save(checkpoint, 3)


def resume_and_save(folder, number):
    """A run resumed from step 2 leaves 3 and 4 aside, and is killed before or while it saves 3 again."""
    checkpoint = opened(folder, keep=9)
    for step in (1, 2, 3, 4):
        save(checkpoint, step)
    checkpoint = opened(folder, keep=9)
    kill_at(number)
    live = state(0, fill=-1.0)
    checkpoint.load("2", live)
    save(checkpoint, 3)


def fall_back_and_save(folder, number):
    """The newest is damaged: the next launch sets it aside, goes on from step 1, and saves 2 again."""
    checkpoint = opened(folder, keep=1)
    for step in (1, 2):
        path = save(checkpoint, step)
    (path / "shard-00000.safetensors").write_bytes(b"")
    checkpoint = opened(folder, keep=1)
    kill_at(number)
    checkpoint.load("latest", state(0, fill=-1.0))
    save(checkpoint, 2)


@pytest.mark.parametrize(
    ("act", "allowed"),
    [
        pytest.param(save_while_one_is_deleted, ([1, 2], [2], [2, 3]), marks=pytest.mark.full),
        pytest.param(resume_and_save, ([1, 2, 3, 4], [1, 2, 4], [1, 2], [1, 2, 3]), marks=pytest.mark.full),
        pytest.param(fall_back_and_save, ([1], [1, 2]), marks=pytest.mark.full),
    ],
)
def test_there_is_always_a_whole_one_and_no_half_one(tmp_path, act, allowed):
    ends = []
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        ends.append(end_of_child(partial(act, folder, number)))
        assert ends[-1] in ("killed", "done"), f"at write {number}: {ends[-1]}"
        again = opened(folder)  # as the next launch does
        assert not list(folder.glob(".tmp-*")) + list(folder.glob(".old-*")), f"at write {number}"
        found = again.load("latest", state(0, fill=-1.0))
        there = again.steps()
        assert there in allowed, f"at write {number}: {there}"
        assert [again.verify(step) for step in there] == [[]] * len(there), f"at write {number}"
        assert found.meta == {"step": there[-1]}, f"at write {number}"
        shutil.rmtree(folder)
        if ends[-1] == "done":
            break
    assert ends.pop() == "done"
    assert len(ends) > 20
    assert set(ends) == {"killed"}
