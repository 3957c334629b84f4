"""run.log.jsonl: what every rank says, each entry a line, over resumes."""

import json
import math
import threading

import pytest
import structlog
import structlog.testing

from nanotrain_core.contracts import Monitor
from nanotrain_core.run import log
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

DDP = Case("parallel", use="ddp", topology={"dp": 2})


def lines(folder, name=log.FILE):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Says(Monitor):
    def __init__(self, fails):
        self.fails = fails

    def on_start(self, run):
        self.log = structlog.get_logger("nanotrain.test")

    def on_step(self, report):
        self.log.info("a step", loss=report.loss)
        self.log.warning("odd", of=[1, 2], path=object)
        if self.fails and report.step == 2:
            raise ValueError("planted")


def run(folder, steps, resume=None, fails=False):
    changes = {"run": {"steps": steps, "strict_monitors": fails}, "checkpoint": {"use": "simple"}}
    structlog.reset_defaults()
    engine = make_engine(DDP, changes, folder=folder, resume=resume, callbacks=[Says(fails)])
    if fails:
        with pytest.raises(ValueError, match="planted"):
            engine.fit()
    else:
        engine.fit()


def test_it_has_warnings_of_every_rank_and_more_of_rank_0_over_a_resume(tmp_path, capfd):
    run_ranks(run, 2, tmp_path, 2)
    run_ranks(run, 2, tmp_path, 3, "latest")
    found = lines(tmp_path)
    for entry in found:
        assert [*entry][:5] == ["time", "rank", "step", "level", "event"]
    told = [(entry["rank"], entry["step"], entry["event"]) for entry in found]
    for step in (1, 2, 3):
        assert told.count((0, step, "a step")) == told.count((0, step, "odd")) == 1
        assert told.count((1, step, "odd")) == 1
    assert not [entry for entry in found if entry["rank"] == 1 and entry["level"] == "info"]
    assert [entry["event"] for entry in found if entry["event"].startswith("run ")] == [
        "run begins",
        "run ends",
    ] * 2
    assert next(entry for entry in found if entry["event"] == "odd")["of"] == [1, 2]


def test_a_run_that_fails_says_why(tmp_path):
    run_ranks(run, 2, tmp_path, 3, None, True)
    failed = [entry for entry in lines(tmp_path) if entry["event"] == "run failed"]
    assert sorted((entry["rank"], entry["level"], entry["error"]) for entry in failed) == [
        (rank, "error", "ValueError('planted')") for rank in (0, 1)
    ]


def test_it_has_the_command_without_secrets(tmp_path, monkeypatch):
    setting = "monitor.3.to.webhook=https://hooks.example/S3CRET"
    monkeypatch.setattr("sys.argv", ["nanotrain", "run", "r.toml", "--set", setting, "--quiet"])
    with log.kept_in(tmp_path, 0):
        log.begin()
    (entry,) = lines(tmp_path)
    assert entry["command"] == 'nanotrain run r.toml --set monitor.3.to.webhook="(hidden)" --quiet'


def test_a_folder_stays_empty_until_the_run_begins_and_a_launcher_makes_no_file(tmp_path):
    with log.kept_in(tmp_path, 0) as kept:
        log.record("warning", "before")
        assert not [*tmp_path.iterdir()]
        kept.begin()
        assert [entry["event"] for entry in lines(tmp_path)] == ["before"]
    other = tmp_path / "refused"
    other.mkdir()
    with log.kept_in(other, None):
        log.say("nothing began")
    assert not [*other.iterdir()]


def test_every_entry_is_json(tmp_path):
    itself = {}
    itself["again"] = itself
    with log.kept_in(tmp_path, 0) as kept:
        kept.begin()
        log.record(
            "info", "odd", loads={(0, 1): 3}, itself=itself, path=tmp_path, loss=math.nan, of=[-math.inf]
        )

    def refuse(constant):
        raise AssertionError(constant)

    (line,) = (tmp_path / log.FILE).read_text().splitlines()
    entry = json.loads(line, parse_constant=refuse)
    assert [entry[key] for key in ("loads", "itself", "path", "loss", "of")] == [
        "{(0, 1): 3}",
        "{'again': {...}}",
        str(tmp_path),
        "NaN",
        ["-Infinity"],
    ]


def test_lines_of_many_writers_stay_whole(tmp_path):
    files = [log.LogFile(tmp_path, rank, lambda: 0) for rank in range(4)]
    for file in files:
        file.begin()
    text = "x" * 3000
    threads = [
        threading.Thread(target=lambda f=file: [f.write("error", text, {"n": n}) for n in range(50)])
        for file in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((entry["rank"], entry["n"]) for entry in lines(tmp_path)) == [
        (rank, n) for rank in range(4) for n in range(50)
    ]


def test_a_line_that_was_cut_short_costs_no_other(tmp_path):
    (tmp_path / log.FILE).write_text('{"event": "on')  # killed while it wrote, or the disk was full
    for rank in (0, 1):
        file = log.LogFile(tmp_path, rank, lambda: 0)
        file.begin()
        file.write("error", f"of rank {rank}", {})
    first, *others = (tmp_path / log.FILE).read_text().splitlines()
    assert first == '{"event": "on'
    assert [json.loads(line)["event"] for line in others] == ["of rank 0", "of rank 1"]


def test_a_large_file_is_put_aside_when_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "LARGEST", 10)
    (tmp_path / log.FILE).write_text('{"event": "of long ago"}\n')
    with log.kept_in(tmp_path, 0) as kept:
        kept.begin()
        log.record("info", "now")
    assert [entry["event"] for entry in lines(tmp_path)] == ["now"]
    assert [entry["event"] for entry in lines(tmp_path, "run.log.1.jsonl")] == ["of long ago"]


def test_a_run_configures_structlog_after_a_test_has_captured_its_logs(capsys):
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as logs:
        log.ensure(0)
        structlog.get_logger().info("captured")
    assert [entry["event"] for entry in logs] == ["captured"]
    log.ensure(0)
    structlog.get_logger().info("printed")
    told = capsys.readouterr()
    assert "event=printed" in told.err
    assert not told.out


def test_a_configuration_of_the_users_own_is_left_alone(capsys):
    structlog.reset_defaults()
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    log.ensure(0)
    structlog.get_logger().info("printed")
    assert capsys.readouterr().out == '{"event": "printed"}\n'
    structlog.reset_defaults()
