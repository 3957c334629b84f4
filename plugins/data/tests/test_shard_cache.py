"""A cache of shards on a file system without locks: each rank fetches for itself."""

import errno
import os
import threading
import time
from hashlib import sha256
from types import SimpleNamespace

import pytest
from nanotrain_data import shard_cache
from nanotrain_data.config import StreamingConfig
from nanotrain_data.remote import RemoteFolder
from nanotrain_data.shard_cache import ShardCache

from nanotrain_core.api import DataError

BODY, PIECES = bytes(range(256)) * 64, bytes(32)
SHARD = SimpleNamespace(
    name="00000", sha256=sha256(BODY).hexdigest(), hashes_sha256=sha256(PIECES).hexdigest()
)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return where the shard comes from; the cache's file system has no locks."""

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(shard_cache.fcntl, "flock", no_locks)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/00000.tokens").write_bytes(BODY)
    (tmp_path / "source/00000.hashes").write_bytes(PIECES)
    url = f"file://{tmp_path}/source"
    return RemoteFolder(url, StreamingConfig(urls=(url,), attempts=1))


def test_ranks_do_not_destroy_each_other_s_download(tmp_path, source, monkeypatch):
    """Both wrote to one file, and the first took it away: the URL was said not to exist."""
    both, fetch, read = threading.Barrier(2), source.fetch, []

    def together(name, to, digest):
        both.wait(10)
        fetch(name, to, digest)
        both.wait(10)

    monkeypatch.setattr(source, "fetch", together)

    def rank():
        read.append(ShardCache(tmp_path / "cache", 10**6).fetch(source, SHARD, len(BODY)).read_bytes())

    threads = [threading.Thread(target=rank) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [BODY, BODY]
    assert not [*(tmp_path / "cache").glob("*.part"), *(tmp_path / "cache").glob("*.reserved")]


def test_a_file_that_is_gone_from_the_cache_is_not_said_to_be_missing_at_the_url(
    tmp_path, source, monkeypatch
):
    get = source._fs.get_file

    def lost(path, to):
        get(path, to)
        os.unlink(to)

    monkeypatch.setattr(source._fs, "get_file", lost)
    with pytest.raises(DataError, match=r"^cannot write to the cache: No such file.*/cache/"):
        ShardCache(tmp_path / "cache", 10**6).fetch(source, SHARD, len(BODY))


def test_room_of_a_process_that_was_killed_is_found_again_after_some_time(tmp_path, source, monkeypatch):
    cache = ShardCache(tmp_path / "cache", len(BODY) + 1)
    left = [tmp_path / "cache" / f"dead.0123.{kind}" for kind in ("reserved", "part")]
    for path in left:
        path.write_bytes(b"xx")
    before = time.time() - 2 * shard_cache.ABANDONED

    waited = []

    def age(seconds):
        waited.append([path.exists() for path in left])
        for path in left if len(waited) == 1 else ():
            os.utime(path, (before, before))

    monkeypatch.setattr(shard_cache.time, "sleep", age)
    assert cache.fetch(source, SHARD, len(BODY)).read_bytes() == BODY
    assert waited == [[True, True], [False, False]]
