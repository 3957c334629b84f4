"""Posts what a run reports to an address, as JSON, from a thread that no step waits for.

The body of a POST is `{"run": name, "lost": 0, "rows": [{"event", "time", "step", ...}]}`, oldest first. Rows
that could not be posted are sent with the next report, so a server may be down for a while. Beyond `waiting`
rows the oldest are dropped; `lost` in the next body is their number.
"""

import time
import urllib.request
from collections import deque
from urllib.parse import urlsplit

import attrs

from nanotrain_core.api import Component, Problem, Range, hookimpl, json_text


@attrs.define(frozen=True, kw_only=True)
class WebhookConfig:
    """`[[monitor]] use = "webhook"`."""

    url: str = "http://127.0.0.1:8080/"
    """Where rows are posted."""
    waiting: int = attrs.field(default=256, validator=Range(1))
    """Reports, and rows, that may wait for the server."""
    timeout: float = attrs.field(default=5.0, validator=Range(0.0, 3600.0, above=True))
    """Seconds that a POST may take."""


def check(recipe, config, layout):
    """Reject a `url` that is not the address of a web server."""
    address = urlsplit(config.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        index = next(number for number, each in enumerate(recipe.monitor) if each.config is config)
        text = f"'{config.url}' is no address; expected https://host/path"
        yield Problem(f"monitor.{index}.url", text)


@hookimpl
def nanotrain_register_monitor(register):
    register(
        Component(
            name="webhook",
            config=WebhookConfig,
            factory=f"{__name__}:build",
            summary="posts metrics, rollbacks and the end of a run to an address",
            provides={"records_metrics"},
            check=check,
        )
    )


def build(config):
    from nanotrain_core.api.torch import Sink

    class Webhook(Sink):
        waiting = config.waiting

        def open(self, run):
            self.name, self.rows, self.lost = run.name, deque(), 0
            self.add("start", run.first_step, steps=run.steps, ranks=run.world_size)

        def write(self, report):
            self.add("metrics", report.step, values=dict(report.values), texts=dict(report.texts))
            self.post()

        def rolled_back(self, report):
            self.add("rollback", report.step, restored=report.restored)
            self.post()

        def finish(self, report):
            self.add("end", report.step, reason=report.reason)
            self.post()

        def add(self, event, step, **fields):
            self.rows.append({"event": event, "time": time.time(), "step": step, **fields})
            if len(self.rows) > config.waiting:
                self.rows.popleft()
                self.lost += 1

        def post(self):
            """Post all rows. An error leaves them for the next report: the queue of sinks logs the first."""
            body = json_text({"run": self.name, "lost": self.lost, "rows": [*self.rows]}).encode()
            request = urllib.request.Request(config.url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=config.timeout):
                self.rows.clear()
                self.lost = 0

    return Webhook()
