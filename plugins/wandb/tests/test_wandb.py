"""What an offline run's file holds is what was published. Nothing here uses a network."""

import json
import math
import platform
import socket
import time
from collections.abc import Iterator

import nanotrain_wandb
import pytest
from nanotrain_wandb import WandbConfig
from nanotrain_wandb.client import Wandb, bins
from wandb.proto import wandb_internal_pb2

from nanotrain_core.api.torch import EndReport, Histogram, MetricsReport, RollbackReport
from nanotrain_core.errors import RecipeError
from nanotrain_core.testing import Case

#: Of LevelDB's log, which wandb's file is: bytes of a block, of a chunk's header, and of the file's.
BLOCK, HEADER, FIRST = 32768, 7, 7
WHOLE, LAST = 1, 4


def records(path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield the records of a ``.wandb`` file, read with wandb's own protocol buffers."""
    data, at, parts = path.read_bytes(), FIRST, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def complete(path):
    """Return all records: ``finish`` returns a moment before wandb's process has written the last ones."""
    until = time.monotonic() + 20
    while not (found := [*records(path)]) or not found[-1].HasField("exit"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def value_of(items):
    """Return nested key -> value."""
    return {
        "/".join(item.nested_key) if len(item.nested_key) > 1 else item.key or item.nested_key[0]: json.loads(
            item.value_json
        )
        for item in items
    }


class Info:
    rank, name = 0, "mine"
    recipe = WandbConfig(tags=("settings",))

    def __init__(self, folder, first_step=0):
        self.folder, self.first_step = folder, first_step


@pytest.fixture
def sink(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")

    def begin(first_step=0):
        made = Wandb(WandbConfig(mode="offline", project="p", entity="e", tags=("a", "b")))
        made.open(Info(tmp_path, first_step))
        return made

    return begin


HISTOGRAM = Histogram((0.0, 1.0, 3.0), (2.0, 4.0), 0.0, 5.0, 0.0)


@pytest.mark.full
def test_the_file_holds_what_was_published_through_a_resume_and_a_rollback(sink, tmp_path):
    run = sink()
    run.write(MetricsReport(1, {"loss": 2.5, "a/b.c": math.nan}, {"h": HISTOGRAM}, {"health": "good"}))
    run.write(MetricsReport(2, {"loss": 1.5, "inf": -math.inf}))
    run.rolled_back(RollbackReport(2, 2, 1, (0, 1), 1, "a spike"))
    run.write(MetricsReport(2, {"loss": 1.25}))
    run.finish(EndReport(2, "preempted", 8))
    run = sink(first_step=2)
    run.write(MetricsReport(3, {"loss": 1.0}))
    run.finish(EndReport(3, "failed", 8))
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    first, second = (complete(path) for path in files)
    (begun,) = (each.run for each in first if each.HasField("run"))
    (again,) = (each.run for each in second if each.HasField("run"))
    assert (begun.run_id, begun.project, begun.entity) == (again.run_id, "p", "e")
    assert (begun.display_name, [*begun.tags]) == ("mine", ["a", "b"])
    assert value_of(begun.config.update)["tags"] == ["settings"]
    metrics = {
        each.metric.name or each.metric.glob_name: each.metric for each in first if each.HasField("metric")
    }
    assert metrics["*"].step_metric == "step"
    rows = [value_of(each.history.item) for each in [*first, *second] if each.HasField("history")]
    told = [{key: x for key, x in row.items() if not key.startswith("_")} for row in rows]
    assert repr(sorted(told[0].items())) == repr(
        sorted(
            {
                "loss": 2.5,
                "a/b.c": math.nan,
                "h/_type": "histogram",
                "h/bins": [0, 1, 3],
                "h/values": [2, 4],
                "h/above": 5,
                "health": "good",
                "step": 1,
                "attempt": 1,
            }.items()
        )
    )
    assert told[1:] == [
        {"loss": 1.5, "inf": -math.inf, "step": 2, "attempt": 1},
        {"loss": 1.25, "step": 2, "attempt": 2},
        {"loss": 1.0, "step": 3, "attempt": 3},
    ]
    seams = [value_of(each.summary.update).get("seams") for each in second if each.HasField("summary")]
    assert [each for each in seams if each] == [
        ["attempt 2: rolled back from step 2 to step 1: a spike", "attempt 3: resumed after step 2"]
    ]
    assert [each.exit.exit_code for each in [*first, *second] if each.HasField("exit")] == [0, 1]


def test_what_is_sent_has_no_secret_of_the_command(sink, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["nanotrain", "run", "r", "--set", "monitor.3.to.webhook=https://h/S3CRET"]
    )
    sink().finish(EndReport(1, "done", 8))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    (begun,) = (each.run for each in complete(file) if each.HasField("run"))
    assert begun.host == socket.gethostname()
    assert begun.telemetry.python_version == platform.python_version()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written if b"S3CRET" in path.read_bytes()] == []


def test_bins_beyond_what_is_taken_are_joined_with_their_neighbors():
    edges = tuple(map(float, range(1026)))
    counts, got = bins(Histogram(edges, (1.0,) * 1025, 0, 0, 0))
    assert (len(counts), counts.sum(), got[0], got[-1]) == (342, 1025, 0.0, 1025.0)
    assert (got[1:] - got[:-1] == counts).all()
    assert [*bins(HISTOGRAM)[0]] == [2.0, 4.0]


def test_a_run_is_refused_where_the_library_is_missing(monkeypatch):
    def missing(name):
        raise nanotrain_wandb.PackageNotFoundError(name)

    monkeypatch.setattr(nanotrain_wandb, "version", missing)
    with pytest.raises(RecipeError, match=r"monitor.0.use: .*pip install wandb"):
        Case("monitor", use="wandb").recipe()
