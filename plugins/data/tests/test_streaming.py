"""``[data] use = "streaming"``: the tokens of ``shards``, whatever happens on their way."""

import fcntl
import functools
import json
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import aiohttp.client
import fsspec
import numpy as np
import pytest
import torch
from corpora import begun, numbered, prepared, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_data import remote
from nanotrain_data.config import ShardsConfig, StreamingConfig
from nanotrain_data.permutation import WindowedPermutation
from nanotrain_data.remote import RemoteFolder
from nanotrain_data.shards import Shards
from nanotrain_data.streaming import Streaming
from nanotrain_data.survey import survey_streaming

from nanotrain_core.api import DataError
from nanotrain_core.api.torch import Shard

LENGTH = 16
WHOLE = Shard()
#: Bytes of a shard of the small folders here, which have 8 each.
SHARD = 4 * 500


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources, whose tokens begin at 0 and 40000."""
    root = tmp_path_factory.mktemp("folders")
    return [numbered(root / name, 4000, first=40000 * n, shards=8) for n, name in enumerate(("one", "two"))]


class Server:
    """Serves a folder over HTTP on 127.0.0.1, and can fail."""

    def __init__(self, folder):
        self.asked, self.failing, self.pause = [], 0, 0.0

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(handler):
                self.asked.append(handler.path)
                if self.failing and handler.path.endswith(".tokens"):
                    self.failing -= 1
                    handler.send_error(503)
                else:
                    super().do_GET()

            def copyfile(handler, source, to):
                """In five pieces."""
                content = source.read()
                for begin in range(0, len(content), size := len(content) // 5 + 1):
                    to.write(content[begin : begin + size])
                    time.sleep(self.pause)

            def log_message(handler, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._http.shutdown()
        self._http.server_close()


def opened(urls, cache, *, length=LENGTH, seed=3, lengths=(), **options):
    options = {"cache_gb": 1.0, "retry_seconds": 0.0, **options}
    return begun(
        Streaming(StreamingConfig(urls=tuple(urls), cache=str(cache), **options)), length, seed, lengths
    )


def local(folders, *, length=LENGTH, seed=3, lengths=(), **options):
    return begun(Shards(ShardsConfig(paths=tuple(map(str, folders)), **options)), length, seed, lengths)


def files(folders):
    return [f"file://{folder}" for folder in folders]


def rows(batch):
    return torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()


def assert_same(ours, theirs, steps=20):
    assert ours.fingerprint == theirs.fingerprint  # one goes on where the other stopped
    for _ in range(steps):
        assert rows(ours.train_batch(6, WHOLE)) == rows(theirs.train_batch(6, WHOLE))
    for _ in range(2):  # the second time of what was kept
        found, wanted = (
            [rows(data.validation_batch(n, 1, WHOLE)) for n in range(data.validation)]
            for data in (ours, theirs)
        )
        assert found == wanted
        assert found


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


# --- what goes wrong --------------------------------------------------------------------------------


def read_all(data):
    for _ in range(60):
        data.train_batch(8, WHOLE)


def test_a_server_that_fails_is_asked_again(folders, tmp_path):
    with Server(folders[0]) as server:
        server.failing = 3
        assert_same(opened([server.url], tmp_path, attempts=4, fetch_ahead=0), local(folders[:1]), steps=10)


@pytest.mark.parametrize("silence", [60.0, 0.05])
def test_a_download_may_take_long_if_bytes_arrive(folders, tmp_path, monkeypatch, silence):
    """Each that took longer than aiohttp's five minutes in all had failed, at every attempt."""
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    monkeypatch.setattr(remote, "SILENCE", silence)
    with Server(folders[0]) as server:
        source = RemoteFolder(server.url, StreamingConfig(urls=(server.url,), attempts=1))
        shard = source.manifest().shards[0]
        server.pause = 0.15
        if silence > 1:
            source.fetch(f"{shard.name}.tokens", tmp_path / "fetched", shard.sha256)
        else:
            with pytest.raises(DataError, match="cannot be read after one attempt: Timeout on reading data"):
                source.fetch(f"{shard.name}.tokens", tmp_path / "fetched", shard.sha256)


def test_who_gives_up_names_url_rank_and_reason(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with Server(folders[0]) as server:
        data = opened([server.url], tmp_path, attempts=2, fetch_ahead=0)
        server.failing = 10**6
        with pytest.raises(DataError) as caught:
            read_all(data)
    assert f"rank 3: {server.url}/0000" in str(caught.value)
    assert ".tokens cannot be read after 2 attempts: 503" in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".part", ".reserved")]


@pytest.mark.parametrize("suffix", [".tokens", ".hashes"])
def test_a_shard_that_is_damaged_where_it_comes_from_is_named(folders, tmp_path, suffix):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    content = bytearray((copy / f"00003{suffix}").read_bytes())
    content[7] ^= 1
    (copy / f"00003{suffix}").write_bytes(content)
    data = opened([f"file://{copy}"], tmp_path / "cache", attempts=2)
    with pytest.raises(DataError, match=f"copy/00003{suffix} is damaged after 2 attempts: its SHA-256 is"):
        read_all(data)
    (copy / f"00003{suffix}").unlink()
    with pytest.raises(DataError, match=f"copy/00003{suffix} does not exist: copy it again"):
        read_all(data)


def test_a_file_that_was_damaged_in_the_cache_is_named_and_fetched_again(folders, tmp_path):
    read_all(opened(files(folders[:1]), tmp_path, read_ahead=0, fetch_ahead=0))  # nothing reads it afterwards
    (path, *_) = sorted(tmp_path.glob("*.tokens"))
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=f"{path.name} was damaged in the cache at byte 0, and was not trained on"
    ):
        read_all(opened(files(folders[:1]), tmp_path))
    assert_same(opened(files(folders[:1]), tmp_path), local(folders[:1]))


@pytest.mark.parametrize("kept", [0, 400, 2**16, 2**17])
def test_a_file_that_was_cut_short_in_the_cache_is_fetched_again(tmp_path, kept):
    """Cut between pieces, no piece is damaged: the next shard would be read in place of what is missing."""
    folder = numbered(tmp_path / "source", 120_000, shards=3)
    read_all(opened(files([folder]), tmp_path / "cache", length=512, read_ahead=0, fetch_ahead=0))
    for path in (tmp_path / "cache").glob("*.tokens"):
        path.write_bytes(path.read_bytes()[:kept])
    assert_same(opened(files([folder]), tmp_path / "cache", length=512), local([folder], length=512))
    assert {path.stat().st_size for path in (tmp_path / "cache").glob("*.tokens")} == {160_000}


@pytest.mark.parametrize("suffix", ["tokens", "hashes"])
def test_a_shard_of_which_a_file_was_deleted_in_the_cache_is_fetched_again(folders, tmp_path, suffix):
    """As those who clean folders of old files do it."""
    alone = {"read_ahead": 0, "fetch_ahead": 0}
    read = rows(opened(files(folders), tmp_path, **alone).train_batch(6, WHOLE))
    for path in (deleted := [*tmp_path.glob(f"*.{suffix}")]):
        path.unlink()
    assert rows(opened(files(folders), tmp_path, **alone).train_batch(6, WHOLE)) == read
    assert deleted
    assert all(path.exists() for path in deleted)


def test_a_shard_without_the_tokens_that_are_asked_for_is_not_read_past(folders):
    (corpus,) = local(folders[:1]).corpora
    tokens = corpus.shard(0)
    tokens[:]
    tokens.tokens = tokens.tokens[:400]
    for begin in (390, 410):
        with pytest.raises(DataError, match=r"00000\.tokens is damaged at byte 1600, and was not trained on"):
            corpus.read(np.array([begin]), LENGTH)


def test_a_folder_that_is_none_is_refused_before_ranks_start(tmp_path):
    config = StreamingConfig(urls=(f"file://{tmp_path}/nothing", "nonsense://a"), attempts=1)
    first, second = survey_streaming(config, LENGTH).problems
    assert (first.key, second.key) == ("data.urls.0", "data.urls.1")
    assert (
        "nothing/manifest.json does not exist: expected a folder that 'nanotrain data prepare'"
        in first.message
    )
    assert "nonsense://a: Protocol not known: nonsense" in second.message


def test_a_cache_that_holds_not_one_shard_is_refused(folders, tmp_path):
    data = opened(files(folders), tmp_path, cache_gb=SHARD / 2 / 1e9)
    with pytest.raises(DataError, match=r"may hold 1e-06 GB, and one shard has 2e-06: raise data.cache_gb"):
        data.train_batch(4, WHOLE)


def test_room_of_a_process_that_was_killed_is_found_again(folders, tmp_path):
    (tmp_path / "dead.reserved").write_bytes(b"x" * 2 * SHARD)
    (tmp_path / "dead.part").write_bytes(b"half")
    data = opened(files(folders), tmp_path, cache_gb=2 * SHARD / 1e9, fetch_ahead=0)
    data.train_batch(4, WHOLE)
    assert not [*tmp_path.glob("dead.reserved"), *tmp_path.glob("dead.part")]


def test_the_tokenizer_comes_with_the_first_source(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    prepared(tmp_path / "out", tmp_path / "a.txt")
    data = opened([f"file://{tmp_path}/out"], tmp_path / "cache")
    assert data.decode(data.encode("naïve")) == "naïve"


def test_a_manifest_cannot_name_files_elsewhere(folders, tmp_path):
    found = json.loads((folders[0] / "manifest.json").read_text())
    found["shards"][0]["sha256"] = "../../etc/passwd"
    del found["sha256"]  # of the manifest
    (tmp_path / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match="names files outside of its folder"):
        RemoteFolder(f"file://{tmp_path}", StreamingConfig(urls=("file:///",))).manifest()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"urls": ()}, "urls names no folder"),
        ({"urls": ("prepared/web",)}, "'prepared/web' is no URL: expected one as s3://bucket/folder"),
        ({"urls": ("s3://me:S3CRET@host/web",)}, r"^a URL of s3 has a password, which (?!.*S3CRET)"),
        ({"urls": ("s3://a", "s3://b"), "weights": (1.0,)}, "1 weights for 2 urls"),
        ({"urls": ("s3://a",), "cache_gb": 0.0}, "expected a number above 0"),
    ],
)
def test_a_wrong_table_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        StreamingConfig(**options)


@pytest.mark.parametrize(
    "url", ["github://org:repo@main/web", "http://[::1]:80/a@b", "http://h:80?x=a@b", "https://h?x=a:b@c"]
)
def test_what_only_resembles_a_password_is_none(url):
    """It had been refused."""
    assert StreamingConfig(urls=(url,)).urls == (url,)


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
