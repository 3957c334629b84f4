"""``[data] use = "streaming"``: the tokens of ``shards``, whatever happens on their way."""

import fcntl
import json
import threading

import fsspec
import numpy as np
import pytest
from corpora import numbered, prepared, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_data.permutation import WindowedPermutation
from streams import LENGTH, SHARD, WHOLE, Server, assert_same, files, local, opened, rows

from nanotrain_core.api import DataError
from nanotrain_core.api.torch import Shard


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources, whose tokens begin at 0 and 40000."""
    root = tmp_path_factory.mktemp("folders")
    return [numbered(root / name, 4000, first=40000 * n, shards=8) for n, name in enumerate(("one", "two"))]


@pytest.mark.parametrize("protocol", ["file", "memory", "http"])
def test_the_tokens_are_those_of_shards(folders, tmp_path, protocol):
    options = {"weights": (3.0, 1.0), "validation_fraction": 0.1}
    theirs = local(folders, **options)
    if protocol == "http":
        with Server(folders[0].parent) as server:
            ours = opened([f"{server.url}/one", f"{server.url}/two"], tmp_path, **options)
            assert_same(ours, theirs)
            assert len([path for path in server.asked if path.endswith(".tokens")]) == 16  # each once
    elif protocol == "memory":
        memory = fsspec.filesystem("memory")
        for folder in folders:
            memory.put(str(folder) + "/", f"/{folder.name}/", recursive=True)
        assert_same(opened(["memory://one", "memory://two"], tmp_path, **options), theirs)
    else:
        assert_same(opened(files(folders), tmp_path, **options), theirs)


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([8, 16, 32])), min_size=1, max_size=6),
    stop=st.integers(0, 5),
    ranks=st.integers(1, 4),
    ahead=st.tuples(st.integers(0, 2), st.integers(0, 4)),
    shuffle=st.sampled_from([0, 1000]),
)
def test_resumed_after_any_step_on_any_ranks_from_a_small_cache(
    folders, tmp_path_factory, steps, stop, ranks, ahead, shuffle
):
    lengths = {length for _, length in steps}
    options = {"lengths": lengths, "length": steps[0][1], "shuffle_tokens": shuffle}
    whole = local(folders, **options)
    expected, metas = [], []
    for count, length in steps:
        metas.append(json.loads(json.dumps(whole.meta())))
        whole.set_length(length)
        expected.append(rows(whole.train_batch(count, WHOLE)))
    stop = min(stop, len(steps) - 1)
    cache = tmp_path_factory.mktemp("cache")
    few = {"cache_gb": 3 * SHARD / 1e9, "read_ahead": ahead[0], "fetch_ahead": ahead[1]}
    others = [opened(files(folders), cache, **options, **few) for _ in range(ranks)]
    for other in others:
        other.load_meta(metas[stop])
    for (count, length), wanted in zip(steps[stop:], expected[stop:], strict=True):
        found = []
        for index, other in enumerate(others):
            other.set_length(length)
            found += rows(other.train_batch(count, Shard(index, ranks)))
        assert found == wanted


def test_ranks_share_a_cache_that_never_holds_more_than_it_may(folders, tmp_path):
    """Four ranks read and fetch at once, where three shards have room."""
    budget, largest, failed = 3 * SHARD, 0, []

    def rank(index):
        try:
            ours, theirs = opened(files(folders), tmp_path, cache_gb=budget / 1e9), local(folders)
            for _ in range(15):
                shard = Shard(index, 4)
                assert rows(ours.train_batch(8, shard)) == rows(theirs.train_batch(8, shard))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with (tmp_path / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.glob("*.tokens")))
        threads[0].join(0.001)
    assert not failed
    assert 0 < largest <= budget


def test_what_is_in_the_cache_is_not_fetched_again(folders, tmp_path):
    with Server(folders[0]) as server:
        for _ in range(2):
            data = opened([server.url], tmp_path)
            for _ in range(30):
                data.train_batch(8, WHOLE)
        assert len([path for path in server.asked if path.endswith(".tokens")]) == 8


def test_shards_of_later_batches_are_fetched_before_they_are_asked_for(folders, tmp_path):
    data = opened(files(folders), tmp_path, read_ahead=0, fetch_ahead=30, shuffle_tokens=500)
    data.train_batch(2, WHOLE)
    needed = set()
    for source, _, begins in data.places(data._order.at(range(2, 62)), validation=False):
        needed |= {
            data._remote[source].manifest.shards[n].sha256 for n in data._remote[source].shards_of(begins)
        }
    for _ in range(2000):
        there = {path.stem for path in tmp_path.glob("*.tokens")}
        if there >= needed:
            break
        threading.Event().wait(0.005)
    assert there >= needed


# --- shuffling within stretches ---------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 60), window=st.integers(1, 20), seed=st.integers(0, 5))
def test_a_windowed_order_has_each_number_once_and_windows_whole(count, window, seed):
    found = WindowedPermutation(count, f"{seed}", window).at(np.arange(count))
    assert sorted(found.tolist()) == [*range(count)]
    for begin in range(0, count - window + 1, window):
        assert len(set((found[begin : begin + window] // window).tolist())) == 1
    back = WindowedPermutation(count, f"{seed}", window).at(np.arange(count)[::-1])
    assert back[::-1].tolist() == found.tolist()


def test_few_shards_are_read_from_at_a_time(folders):
    """Of stretches as long as a shard: two at most, and a third where one ends."""
    data, order = local(folders[:1], shuffle_tokens=500), []
    for _ in range(data.train):
        order.append(rows(data.train_batch(1, WHOLE))[0][0])
    assert len(set(order)) == data.train
    assert order != sorted(order)
    window = 500 // LENGTH
    for begin in range(0, data.train, window):
        assert len({token // 500 for token in order[begin : begin + window]}) <= 3
    other = local(folders[:1])
    assert rows(other.train_batch(8, WHOLE)) != rows(
        local(folders[:1], shuffle_tokens=500).train_batch(8, WHOLE)
    )
    with pytest.raises(DataError, match="other data"):
        other.load_meta(data.meta())


def test_the_tokenizer_comes_with_the_first_source(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    prepared(tmp_path / "out", tmp_path / "a.txt")
    data = opened([f"file://{tmp_path}/out"], tmp_path / "cache")
    assert data.decode(data.encode("naïve")) == "naïve"


@pytest.mark.full
def test_s3(folders, tmp_path, monkeypatch):
    from nanotrain_core.testing.object_server import ObjectServer

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3")
        store.mkdir("corpora")
        store.put(f"{folders[0]}/", "corpora/one/", recursive=True)
        assert_same(opened(["s3://corpora/one"], tmp_path), local(folders[:1]))
