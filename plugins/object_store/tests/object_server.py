"""An S3 server on 127.0.0.1 that can be killed, brought back with what it had, made to fail or to be slow."""

import threading
import time
from uuid import uuid4

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "checkpoints"


class ObjectServer:
    """moto's, in a thread. It answers 503 where ``fail(method, path)``, and after ``delay`` seconds."""

    def __init__(self):
        self.fail, self.delay, self.requests = lambda method, path: False, 0.0, []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = self._thread = None
        self.port = 0
        self.bucket = f"{BUCKET}-{uuid4().hex[:8]}"

    def __enter__(self):
        self.start()
        self.client.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_):
        self.kill()

    def _answer(self, environ, start):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("QUERY_STRING", "")))
        time.sleep(self.delay)
        if self.fail(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"no"]
        return self._app(environ, start)

    def start(self):
        """Serve, on the port of the first time."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def kill(self):
        """Refuse connections from now on; what is stored stays."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    @property
    def client(self):
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def url(self, prefix):
        return f"s3://{self.bucket}/{prefix}"

    def names(self):
        """Return what is in the bucket."""
        return sorted(
            entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        )

    def parts_left(self):
        """Return multipart uploads that were begun and neither completed nor broken off."""
        return self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
