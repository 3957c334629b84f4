"""Shards behind URLs, read through a cache."""

import functools
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import torch
from corpora import begun
from nanotrain_data.config import ShardsConfig, StreamingConfig
from nanotrain_data.shards import Shards
from nanotrain_data.streaming import Streaming

from nanotrain_core.api.torch import Shard

LENGTH = 16


WHOLE = Shard()


#: Bytes of a shard of the small folders here, which have 8 each.
SHARD = 4 * 500


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
