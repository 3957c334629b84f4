"""The example ``webhook``: a monitor that posts what a run reports."""

import http.server
import json
import math
import threading
from types import SimpleNamespace

import pytest
from examples_of_plugins import example
from test_docs import failed

from nanotrain_core.contracts import EndReport, MetricsReport
from nanotrain_core.errors import RecipeError
from nanotrain_core.testing.probe import make_engine


class Answers(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies that it is sent; answers 503 as often as its server says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.away -= 1
        if self.server.away < 0:
            self.server.bodies.append(body)
        self.send_response(200 if self.server.away < 0 else 503)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.bodies, server.away = [], 0
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}/hook"
        yield server
        server.shutdown()


def test_what_a_run_reports_is_posted_in_order(server):
    engine = make_engine(example("monitor", "webhook", config={"url": server.url}), {})
    engine.fit()
    rows = [row for body in server.bodies for row in body["rows"]]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("start", 0),
        ("metrics", 1),
        ("metrics", 2),
        ("metrics", 3),
        ("end", 3),
    ]
    assert {body["run"] for body in server.bodies} == {"conformance"}
    assert all(math.isfinite(row["values"]["loss"]) for row in rows[1:4])
    assert rows[-1]["reason"] == "done"


def test_rows_wait_for_a_server_that_is_away_and_those_lost_are_counted(server):
    server.away = 2
    sink = example("monitor", "webhook", config={"url": server.url, "waiting": 2}).build()
    sink.open(SimpleNamespace(name="mine", first_step=0, steps=9, world_size=1))
    for step in (1, 2):
        with pytest.raises(OSError, match="503"):
            sink.write(MetricsReport(step, {"loss": math.nan}))
    sink.write(MetricsReport(3, {"loss": 2.0}))
    sink.finish(EndReport(3, "done", 99))
    first, last = server.bodies
    assert first["lost"] == 2
    assert [(row["step"], row["values"]["loss"]) for row in first["rows"]] == [(2, "NaN"), (3, 2.0)]
    assert (last["lost"], [row["event"] for row in last["rows"]]) == (0, ["end"])


def test_an_address_that_is_none_is_refused():
    with pytest.raises(
        RecipeError, match=r"monitor\.0\.url: 'somewhere' is no address; expected https://host/path"
    ):
        example("monitor", "webhook", config={"url": "somewhere"}).recipe()


@pytest.mark.full
def test_webhook_passes_every_check(server):
    assert failed(example("monitor", "webhook", config={"url": server.url}, topology={"dp": 2})) == {}
