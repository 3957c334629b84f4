"""Files that checkpoints share on the disk are copied within the store, and sent again where that fails."""

import os
from unittest import mock

import pytest
from nanotrain_object_store.catalogue import look, missing, read_markers
from nanotrain_object_store.fetch import fetch
from nanotrain_object_store.flight import Flight
from nanotrain_object_store.staged import stage
from nanotrain_object_store.store import Store
from nanotrain_object_store.stored import Stored
from small_runs import fit

FROZEN = bytes(range(256)) * 16


@pytest.fixture(params=["s3", pytest.param("file", marks=pytest.mark.full)])
def store(request, tmp_path):
    if request.param == "file":
        return Store(f"file://{tmp_path / 'store'}")
    return Store(request.getfixturevalue("server").url("p"))


def saved(folder, step, shares=None):
    """Write a checkpoint whose frozen weights are a link to those of another."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "trained").write_bytes(b"%d" % step * 1000)
    if shares is None:
        (path / "frozen").write_bytes(FROZEN)
    else:
        os.link(shares / "frozen", path / "frozen")
    return path


def upload(store, step, path, earlier=None):
    """Upload it; return its flight, and the names of the files that were sent."""
    flight = Flight(stage(step, path, None, rank=0), f"step-{step:08d}-0000000{step}", store, earlier)
    with mock.patch.object(store, "put", wraps=store.put) as put:
        flight.upload()
        flight._thread.join()
    assert flight.problem == ""
    return flight, sorted(call.args[1].rpartition("/")[2] for call in put.call_args_list)


def assert_whole(store, flight, path, scratch):
    """Fetch it by the hashes that its marker would have, and compare it with the disk's."""
    name, step = path.name, flight.staged.step
    stored = Stored(entry=flight.entry, step=step, run="r", name=name, folder=True, files=flight.sent)
    assert fetch(store, stored, stored.files, scratch) == ""
    for file in path.iterdir():
        assert (scratch / file.name).read_bytes() == file.read_bytes()


def test_a_shared_file_is_copied_within_the_store(store, tmp_path):
    first = saved(tmp_path / "c", 1)
    second = saved(tmp_path / "c", 2, shares=first)
    one, sent = upload(store, 1, first)
    assert sent == ["frozen", "trained"]
    two, sent = upload(store, 2, second, one.in_store)
    assert sent == ["trained"]
    assert_whole(store, two, second, tmp_path / "back")
    store.delete([name for name in store.sizes() if name.startswith(one.entry)])
    third = saved(tmp_path / "c", 3, shares=first)
    three, sent = upload(store, 3, third, two.in_store)
    assert sent == ["trained"]  # of the second: the first is gone
    assert_whole(store, three, third, tmp_path / "again")


def gone(store, path, entry):
    store.delete([name for name in store.sizes() if name.startswith(entry)])


def written_anew(store, path, entry):
    (path / "frozen").write_bytes(bytes(reversed(FROZEN)))


def without_copies(store, path, entry):
    def copy(source, name):
        raise NotImplementedError

    store.copy = copy


@pytest.mark.parametrize("change", [gone, written_anew, without_copies])
def test_it_is_sent_again_if_it_cannot_be_copied(store, tmp_path, change):
    first = saved(tmp_path / "c", 1)
    one, _ = upload(store, 1, first)
    second = saved(tmp_path / "c", 2, shares=first)
    change(store, second, one.entry)
    two, sent = upload(store, 2, second, one.in_store)
    assert sent == ["frozen", "trained"]
    assert_whole(store, two, second, tmp_path / "back")


@pytest.mark.full
def test_frozen_weights_of_a_run_are_sent_once(server, tmp_path):
    puts, put = [], Store.put

    def noted(store, path, name):
        puts.append((name.split("-")[1], path.stat().st_size))
        put(store, path, name)

    more = 'keep = 9\n[[parallel]]\nuse = "lora"\nrank = 2\n'
    with mock.patch.object(Store, "put", noted):
        fit(tmp_path / "one", server.url("p"), use="sharded_v2", more=more)
    nbytes = {step: sum(size for which, size in puts if which == step) for step, _ in puts}
    assert nbytes["00000006"] < 0.7 * nbytes["00000002"]  # 4 may have been left out
    store = Store(server.url("p"))
    listing = look(store)
    for stored in read_markers(store, listing, pytest.fail):
        assert missing(stored, listing.objects[stored.entry]) == []
        assert fetch(store, stored, stored.files, tmp_path / stored.entry) == ""
    resumed = fit(tmp_path / "two", server.url("p"), use="sharded_v2", more=more, steps=8, resume="auto")
    assert [*resumed.losses] == [7, 8]
