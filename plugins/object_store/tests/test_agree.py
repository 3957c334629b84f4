"""Ranks that fetch for longer than a hang say that they are alive, as long as one of them advances."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
from nanotrain_object_store import agree as module
from nanotrain_object_store.agree import agree
from nanotrain_object_store.store import Store
from small_runs import fit

from nanotrain_core.watch.progress import Progress


@attrs.define
class Mesh:
    """Two ranks of this process."""

    rank: int
    barrier: threading.Barrier
    values: dict
    world_size = 2

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait(timeout=20)
        found = [self.values[rank] for rank in range(2)]
        self.barrier.wait(timeout=20)
        return found


@attrs.define
class Restore:
    mesh: Mesh
    folder = Path("checkpoints")
    alive_at: list = attrs.field(factory=list)

    def heartbeat(self):
        self.alive_at.append(time.monotonic())


def on_two_ranks(*acts):
    barrier, values = threading.Barrier(2), {}
    ranks = [Restore(Mesh(rank, barrier, values)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        said = [*pool.map(agree, acts, ranks)]
    return said, [len(rank.alive_at) for rank in ranks]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(module, "LAST", 0.05)


def test_a_rank_that_waits_for_the_fetch_of_another_is_alive(tmp_path):
    def slow(alive):
        for _ in range(20):
            time.sleep(0.03)
            alive()
        return ""

    said, alive = on_two_ranks(slow, lambda alive: "")
    assert said == ["", ""]
    assert alive[0] == alive[1] >= 5


def test_a_fetch_that_does_not_advance_is_not_alive():
    def stuck(alive):
        time.sleep(0.5)
        return "it is gone"

    assert on_two_ranks(lambda alive: "", stuck) == (["rank 1: it is gone"] * 2, [0, 0])


def test_an_error_of_the_disk_is_told_on_all_ranks_and_another_raised():
    def full(alive):
        raise OSError(28, "No space left on device", "step-00000004")

    said, _ = on_two_ranks(full, lambda alive: "")
    assert said == ["rank 0: step-00000004: No space left on device"] * 2
    with pytest.raises(ZeroDivisionError):
        agree(lambda alive: str(1 // 0), Restore(Mesh(0, threading.Barrier(1), {1: ("", 0)})))


def test_a_long_fetch_at_the_start_counts_as_progress(tmp_path, monkeypatch):
    """Nothing did: after five times run.hang_timeout it was killed as a hang, in every restart again."""
    url = f"file://{tmp_path / 'store'}"
    first = fit(tmp_path / "one", url, steps=4)
    get, noted = Store.get, []

    def slow(store, name, path, alive):
        for _ in range(10):
            time.sleep(0.03)
            alive()
        get(store, name, path, alive)

    note = Progress.note

    def noting(progress, phase, step=0, *, first=False):
        noted.append(phase)
        note(progress, phase, step, first=first)

    monkeypatch.setattr(Store, "get", slow)
    monkeypatch.setattr(Progress, "note", noting)
    again = fit(tmp_path / "two", url, steps=6, resume="auto")
    assert [*again.losses] == [5, 6]
    assert [*first.losses] == [1, 2, 3, 4]
    assert noted[:3] == ["start"] * 3
