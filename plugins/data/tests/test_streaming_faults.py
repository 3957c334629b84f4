"""``[data] use = "streaming"``: what goes wrong on the way of a shard, or in the cache."""

import json

import aiohttp
import aiohttp.client
import numpy as np
import pytest
from corpora import numbered
from nanotrain_data import remote
from nanotrain_data.config import StreamingConfig
from nanotrain_data.remote import RemoteFolder
from nanotrain_data.survey import survey_streaming
from streams import LENGTH, SHARD, WHOLE, Server, assert_same, files, local, opened, rows

from nanotrain_core.api import DataError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources, whose tokens begin at 0 and 40000."""
    root = tmp_path_factory.mktemp("folders")
    return [numbered(root / name, 4000, first=40000 * n, shards=8) for n, name in enumerate(("one", "two"))]


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
