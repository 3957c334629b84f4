"""An S3 server on 127.0.0.1 that can be killed, restarted with its contents, made to fail or to be slow.

moto's, in a thread of this process: ``pip install 'moto[server]' s3fs``. Other processes find it by
:attr:`ObjectServer.environment`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self
from uuid import uuid4


class ObjectServer:
    """Serves one bucket within a ``with`` block."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.fail: Callable[[str, str], bool] = lambda method, path: False
        """Whether to answer 503 to a request, by its method and path."""
        self.delay = 0.0
        """Seconds before an answer."""
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and query of each so far."""
        self.port = 0
        self.bucket = f"checkpoints-{uuid4().hex[:8]}"
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: Any = None

    def __enter__(self) -> Self:
        self.start()
        self.client.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_up(self) -> bool:
        """Whether it accepts connections."""
        return self._server is not None

    def start(self) -> None:
        """Serve the stored contents, on the port of the first time."""
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log_request(self, *_: object) -> None:
                """Log nothing: tests read what runs print to stderr."""

        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=Quiet)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None  # only now: who sees that it is down may start it again on this port

    def _answer(self, environ: Any, start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("QUERY_STRING", "")))
        time.sleep(self.delay)
        if self.fail(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"no"]
        answer: Iterable[bytes] = self._app(environ, start)
        return answer

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process uses it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    @property
    def client(self) -> Any:
        """A boto3 client."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def url(self, prefix: str) -> str:
        """Return the URL of a prefix."""
        return f"s3://{self.bucket}/{prefix}"

    def names(self) -> list[str]:
        """Return the contents of the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def parts_left(self) -> list[Any]:
        """Return multipart uploads that were begun and neither completed nor aborted."""
        found: list[Any] = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return found
