"""SIGKILL at every write of a save that also deletes: what was there stays whole, or goes as a whole."""

import shutil
from functools import partial

from small_run import opened, save, state

from nanotrain_core.testing.disaster import end_of_child, kill_at


def test_retention_and_a_new_checkpoint(tmp_path):
    """Of steps 1 and 2 the next save deletes 1, keeping one."""
    ends = []
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        ends.append(end_of_child(partial(save_three_and_die, folder, number)))
        assert ends[-1] in ("killed", "done"), f"at write {number}: {ends[-1]}"
        again = opened(folder)  # as the next launch does
        assert not list(folder.glob(".*")), f"at write {number}"
        there = again.steps()
        assert there in ([1, 2], [2], [2, 3]), f"at write {number}: {there}"
        assert [again.verify(step) for step in there] == [[]] * len(there), f"at write {number}"
        found = again.load("latest", state(0, fill=-1.0))
        assert found.meta == {"step": there[-1]}, f"at write {number}"
        shutil.rmtree(folder)
        if ends[-1] == "done":
            break
    assert ends.pop() == "done"
    assert len(ends) > 40
    assert set(ends) == {"killed"}


def save_three_and_die(folder, number):
    checkpoint = opened(folder, keep=1)
    for step in (1, 2):
        save(checkpoint, step)
    kill_at(number)
    save(checkpoint, 3)
