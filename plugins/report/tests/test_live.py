"""A run that goes on: served to a browser of this machine, and shown in the terminal."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up import DECLARED, MadeUp, full_run
from nanotrain_report.clock import took, wall
from nanotrain_report.folder import open_run
from nanotrain_report.screen import eta
from nanotrain_report.serve import Server

from nanotrain_core.api import Metric, Rule
from nanotrain_core.cli import main

COMMAND = [sys.executable, "-c", "import sys; from nanotrain_core.cli import main; sys.exit(main())"]


@pytest.fixture
def served(tmp_path):
    run = MadeUp(tmp_path / "run")
    run.start()
    run.step(1)
    run.write()
    (tmp_path / "secret").write_text("not for you")
    with Server([run.folder], 0) as server:
        server.report.rest.times = 0.0
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield run, server.server_address
        server.shutdown()


def get(address, path, host=None):
    connection = HTTPConnection(*address, timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_and_its_state_follow_the_run(served):
    run, address = served
    assert address[0] == "127.0.0.1"
    _, before = get(address, "/state")
    code, text = get(address, "/")
    assert code == 200
    assert "step 1 of 200" in text
    assert 'id="live"' in text
    assert get(address, "/state") == (200, before)
    run.step(2)
    run.write()
    assert get(address, "/state")[1] != before
    assert "step 2 of 200" in get(address, "/")[1]


def test_nothing_else_is_served_to_nobody_else(served):
    run, address = served
    for path in ("/metrics.jsonl", "/../secret", "/%2e%2e/secret", "//etc/passwd", "/report.html"):
        assert get(address, path)[0] == 404
    assert get(address, "/", host="evil.example:80")[0] == 403
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "recipe.toml").unlink()
    assert get(address, "/")[0] == 410


def test_serving_ends_in_order(tmp_path):
    folder = full_run(tmp_path / "run", 10)
    child = subprocess.Popen(
        [*COMMAND, "report", str(folder), "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = child.stdout.readline()
    port = int(re.search(r"127.0.0.1:(\d+)/", line)[1])
    assert get(("127.0.0.1", port), "/state")[0] == 200
    for _ in range(2):  # as to the process and to its group
        child.send_signal(signal.SIGTERM)
    _out, err = child.communicate(timeout=20)
    assert (child.returncode, err) == (0, "")


def test_a_port_that_is_taken_is_told(tmp_path, capsys):
    folder = full_run(tmp_path / "run", 10)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["report", str(folder), "--serve", "--port", str(port)]) != 0
    assert f"--port {port}" in capsys.readouterr().err


def shown(capsys, *words):
    """Return what ``nanotrain top`` prints, without its frame and folds."""
    assert main(["top", *words]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_top_prints_once_into_a_pipe(tmp_path, capsys):
    out = shown(capsys, str(full_run(tmp_path / "run", 100)))
    for words in ("step 100 of 100, 100%", "█▇", "rank 3", "1.6 GB", "gradients are fine"):
        assert words in out
    assert "2; the last after step 57 (loss was NaN); 11 steps lost in all" in out
    assert "rank 2 was killed by SIGKILL" in out


def test_top_knows_a_run_that_goes_on(tmp_path, capsys):
    run = MadeUp(tmp_path / "run", steps=40)
    run.start()
    for step in range(1, 11):
        run.step(step)
    run.write()
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": "now"}
    (run.folder / ".lock").write_text(json.dumps(owner))
    out = shown(capsys, str(run.folder), "--once")
    assert "running, step 10 of 40" in out
    assert "about 15 s left" in out  # rows are half a second apart
    (run.folder / ".lock").write_text(json.dumps(owner | {"pid": 2**22 + 1}))
    assert "ended without a word at step 10 of 40" in shown(capsys, str(run.folder))


@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 7 * 86400.0])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_clock_that_jumps_changes_no_time(tmp_path, jump, resumed):
    """The time left was none, or 184 days."""
    run = MadeUp(tmp_path / "run", steps=200)
    run.start()
    for step in range(1, 101):
        run.now += jump * (step == 95)
        if step == 90 and resumed:
            run.now += 5000.0
            run.start(89)
        run.step(step)
    run.row("end", reason="done", step=100)
    run.write()
    found = open_run(run.folder)
    assert eta(found) == pytest.approx(50)  # rows are half a second apart
    assert wall(found) == pytest.approx(51.0 + 5001.0 * resumed, abs=0.6)
    assert took(found, 91, 100) == pytest.approx(4.5)
    assert took(found, 91, 101) is None


@pytest.mark.parametrize("event", ["evaluation", "checkpoint", "checkpoint not measured", "save_failed"])
@pytest.mark.parametrize("jump", [0.0, -3600.0, 86400.0])
def test_long_evaluations_and_saves_are_time_of_the_run_and_jumps_beside_them_are_not(tmp_path, event, jump):
    """They had been taken for jumps of the clock, and then jumps for them."""
    run = MadeUp(tmp_path / "run", steps=200)
    fields = {"loss": 1.0, "path": "step", "seconds": 1500.0, "blocked": 1500.0, "problem": "disk full"}
    event, _, unknown = event.partition(" ")
    if unknown:
        fields["blocked"] = 0.0
    run.start()
    for step in range(1, 101):
        run.step(step)
        if step % 20 == 0:
            run.now += 1500.0 + jump * (step == 40)
            run.row(event, step=step, **fields)
    run.row("end", reason="done", step=100)
    run.write()
    expected = 53.5 + 5 * 1500.0
    if unknown or event == "save_failed":  # nobody knows how long the one took in which the clock was set
        expected += jump if jump > 0 else -1500.0 * (jump < 0)
    assert wall(open_run(run.folder)) == pytest.approx(expected, abs=1.0)


def test_top_of_a_run_without_metrics_goes_by_its_log(tmp_path, capsys):
    run = MadeUp(tmp_path / "run", steps=4)
    recipe = run.folder / "recipe.toml"
    recipe.write_text(recipe.read_text() + '[[monitor]]\nuse = "console"\n')
    entries = [{"event": "run begins", "step": 0}, {"event": "run ends", "step": 4, "reason": "done"}]
    log = run.folder / "run.log.jsonl"
    log.write_text("".join(json.dumps({"level": "info", "rank": 0, **entry}) + "\n" for entry in entries))
    out = shown(capsys, str(run.folder))
    for words in ("done after step 4 of 4", "step 4 of 4, 100%", 'no [[monitor]] use = "jsonl"'):
        assert words in out
    assert "nothing logged" not in out
    with log.open("a") as more:
        more.write(json.dumps({"event": "run begins", "step": 4}) + "\n")
    assert "ended without a word at step 4 of 4" in shown(capsys, str(run.folder))


def test_top_names_a_monitor_that_failed(tmp_path, capsys):
    run = MadeUp(tmp_path / "run", steps=4)
    run.start()
    run.step(1)
    run.write()
    why = "Traceback (most recent call last):\n  ...\nKeyError: 'loss'"
    entries = [
        {"event": "run begins", "step": 0, "level": "info"},
        {
            "event": "a monitor failed and the run goes on",
            "monitor": "Health.on_step",
            "exception": why,
            "level": "error",
        },
        {
            "event": "a monitor failed on a rank: what it published until this step is left out",
            "monitor": "Health",
            "on_rank": 1,
            "level": "warning",
        },
    ]
    log = run.folder / "run.log.jsonl"
    log.write_text("".join(json.dumps({"rank": 0, **entry}) + "\n" for entry in entries))
    out = shown(capsys, str(run.folder))
    assert "Health.on_step: a monitor failed and the run goes on (KeyError: 'loss')" in out
    assert "warning: Health on rank 1: a monitor failed" in out


def test_top_lists_what_is_wrong_now_worst_and_causes_first(tmp_path, capsys):
    def ruled(name, group, **limits):
        return Metric(name=name, unit="1", group=group, summary="", rule=Rule(**limits))

    declared = [
        ruled("norms/{norm}", "residual stream", bad_above=2, high="{where} is large"),
        ruled("clip", "gradients", warn_below=0.1, low="gradients are clipped"),
        ruled("collapse", "attention", bad_above=1, high="attention has collapsed"),
    ]
    run = MadeUp(tmp_path / "run", declared=[*declared, *DECLARED])
    run.start()
    for step in range(1, 6):
        run.step(step)
        values = {"norms/layers.0.ffn_norm": 3.0, "clip": 0.01, "collapse": 2.0}
        run.row("metrics", step=step, values=values, texts={"health": "step 5: this is over: a spike."})
    out = shown(capsys, str(run.write()))
    places = [
        out.index(words)
        for words in ("Attention has collapsed", "layers.0.ffn_norm is large", "Gradients are clipped")
    ]
    assert places == sorted(places)
    assert "a spike" not in out


def test_a_run_that_began_anew_before_its_first_checkpoint_is_shown(tmp_path, capsys):
    """Of what it had logged nothing is kept: no curve, no histogram, no text."""
    run = MadeUp(tmp_path / "run", steps=40)
    run.start()
    for step in range(1, 21):
        run.step(step)
        run.rich(step)
    run.row("metrics", step=20, values={}, texts={"health": "step 20: one rank is slow."})
    run.start(0)
    folder = str(run.write())
    assert "step 0 of 40" in shown(capsys, folder)
    page = tmp_path / "page.html"
    assert main(["report", folder, "--out", str(page)]) == 0
    assert "No step has been logged yet" in page.read_text()


def test_top_names_the_run_that_was_meant(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "moe", "laptop"):
        full_run(Path("runs") / name, 10)
    for given, meant in (("runs/a/metrics.jsonl", "runs/a"), ("laptop", "runs/laptop")):
        assert main(["top", given]) != 0
        assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_top_follows_in_a_terminal_until_ctrl_c(tmp_path):
    run = MadeUp(tmp_path / "run", steps=40)
    run.start()
    run.step(1)
    run.write()
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job hands on that it is ignored
        os.execv(sys.executable, [*COMMAND, "top", str(run.folder), "--every", "0.1"])
    until(terminal, b"step 1 of 40")
    run.step(2)
    run.write()
    until(terminal, b"step 2 of 40")
    os.write(terminal, b"\x03")
    until(terminal, b"\x1b[?25h")  # the cursor is back
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)


def test_top_leaves_the_machine_to_training(tmp_path, capsys, monkeypatch):
    """Of a file that takes a second to read and grows all the time, a tenth of the time at most."""
    folder, clock, read = full_run(tmp_path / "run", 10), [1000.0], []

    def slow(path):
        clock[0] += 1.0
        read.append(clock[0])
        return open_run(path)

    def sleep(seconds):
        clock[0] += seconds
        if clock[0] > 1400.0:
            raise KeyboardInterrupt

    passing = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("nanotrain_report.top.time", passing)
    monkeypatch.setattr("nanotrain_report.rest.time", passing)
    monkeypatch.setattr("nanotrain_report.top.state", lambda folder: clock[0])
    monkeypatch.setattr("nanotrain_report.folder.open_run", slow)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["top", str(folder), "--every", "2"]) == 0
    assert 25 <= len(read) <= 40


def until(terminal, words):
    """Read from a terminal until it has shown ``words``."""
    seen, deadline = b"", time.monotonic() + 60
    while words not in seen:
        assert select.select([terminal], [], [], 20)[0], seen
        assert time.monotonic() < deadline, seen
        seen += os.read(terminal, 65536)
