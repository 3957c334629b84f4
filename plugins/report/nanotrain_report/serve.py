"""``nanotrain report --serve``: the report of a run that goes on, on this machine alone."""

from __future__ import annotations

import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from nanotrain_core.api import Exit, NanotrainError, is_running
from nanotrain_report.folder import open_run
from nanotrain_report.html import page
from nanotrain_report.rest import Rest

#: What a browser may call this machine: a name of somebody else's that leads here is refused.
OWN_NAMES = ("127.0.0.1", "localhost")
#: Files whose growth makes a report old.
WATCHED = ("metrics.jsonl", "run.log.jsonl", "samples.jsonl")


class Report:
    """A report that is rendered again when its runs have new data."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock = threading.Lock()
        self.rest = Rest()
        self._of, self._text = "", b""

    def state(self) -> str:
        """Return something that changes when the report would."""
        if not self.rest.over:
            return self._of
        files = [path / name for path in self.paths for name in WATCHED]
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        alive = [int(is_running(path)) for path in self.paths]  # that a process has gone is news, too
        return "-".join(map(str, sizes + alive))

    def text(self) -> bytes:
        """Return the page."""
        with self._lock:
            state = self.state()
            if state != self._of:
                with self.rest.after():
                    self._text = page([open_run(path) for path in self.paths], live=True).encode()
                self._of = state
            return self._text


class Handler(BaseHTTPRequestHandler):
    """Answers two addresses: the report, and its state. It serves no file."""

    server: Server

    def do_GET(self) -> None:
        """Answer."""
        if self.headers.get("Host", "").rpartition(":")[0] not in OWN_NAMES:
            self.send_error(403, "this report is for this machine")
            return
        kind = {"/": "text/html; charset=utf-8", "/state": "text/plain; charset=utf-8"}.get(self.path)
        if kind is None:
            self.send_error(404, "there is the report at / and nothing else")
            return
        try:
            body = self.server.report.text() if self.path == "/" else self.server.report.state().encode()
        except NanotrainError as error:  # as of a folder that was removed meanwhile
            self.send_error(410, str(error).splitlines()[0])
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


class Server(ThreadingHTTPServer):
    """Serves one report on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        """Listen.

        Raises:
            NanotrainError: a path is no run, or the port is taken.
        """
        for path in paths:
            open_run(path)
        self.report = Report(paths)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as problem:
            raise NanotrainError(
                f"--port {port}: {problem.strerror}; without it a free one is taken"
            ) from None

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away while it is answered is no news; all else is told in one line."""
        problem = sys.exception()
        if not isinstance(problem, ConnectionError):
            print(f"nanotrain: {type(problem).__name__}: {problem}", file=sys.stderr)


def serve(paths: Sequence[Path], port: int) -> int:
    """Serve the report until Ctrl-C or SIGTERM."""
    with Server(paths, port) as server:
        stop = threading.Thread(target=server.shutdown, daemon=True)

        def end(*_: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come again, as to a process and its group
            stop.start()

        signal.signal(signal.SIGTERM, end)
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        print(f"{address} follows {', '.join(map(str, paths))}; Ctrl-C ends it", flush=True)
        if sys.stdout.isatty():
            webbrowser.open(address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return Exit.DONE
