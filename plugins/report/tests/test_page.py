"""The report as a file: what it has of a run, that it is safe and offline, and how large it gets."""

import base64
import gzip
import io
import json
import os
import re
import time
from datetime import UTC, datetime
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from made_up import MadeUp, full_run
from nanotrain_report.about import whole
from nanotrain_report.folder import open_run
from nanotrain_report.html import page
from nanotrain_report.screen import screen
from rich.console import Console

from nanotrain_core.api import Metric
from nanotrain_core.cli import main

#: Attributes by which a page has a browser fetch something.
FETCHING = {"src", "srcset", "data", "poster", "action", "background", "cite", "ping"}


class Page(HTMLParser):
    """Text by section, attributes, scripts and the data of figures."""

    def __init__(self, text):
        super().__init__()
        self.sections, self.fetched, self.labels, self.items, self.styles = {}, [], [], [], []
        self.scripts, self._within, self._section, self.policy = 0, "", "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self._within = tag if tag in ("script", "style") else ""
        if tag == "section":
            self._section = given["id"]
        if tag == "script":
            self.scripts += 1
            self._json = given.get("type") == "application/json"
        self.fetched += [value for key, value in attrs if key in FETCHING]
        self.fetched += [given["href"]] if tag == "link" else []
        self.policy = given["content"] if "http-equiv" in given else self.policy
        self.labels += [given["aria-label"]] if "aria-label" in given else []

    def handle_endtag(self, tag):
        self._within = ""
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if self._within == "script":
            self.items += [json.loads(data)] if self._json else []
        elif self._within == "style":
            self.styles.append(data)
        else:
            self.sections[self._section] = self.sections.get(self._section, "") + data + " "


def arrays(item):
    """Yield every array of a figure's data."""
    waiting = [item]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and each.get("type") == "ndarray":
            raw = gzip.decompress(base64.b64decode(each["array"]["data"]))
            yield np.frombuffer(raw, dtype=each["dtype"])
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = full_run(tmp_path_factory.mktemp("full") / "run", 300)
    return open_run(folder), page([open_run(folder)])


def test_every_section_tells_of_its_part_of_the_run(full):
    found = Page(full[1]).sections
    assert "None: rank 3 comes closest, at 50%" in found["answers"]
    assert "Gradients are very large" in found["health"]
    assert "steps 210 to 214" in found["health"]
    assert "In steps that were given up: The loss is not a number" in found["health"]
    assert "gradients are fine; one rank is slow" in found["health"]
    rows = " ".join(found["continuity"].split())
    assert "2 resume" in rows
    assert "127 120 7 killed" in rows
    assert "3 rollback" in rows
    assert "181 177 4 loss was NaN" in rows
    assert "forward backward 80%" in found["time"]
    assert "1.6 GB" in found["memory"]
    assert "there is no pipeline" in found["pipeline"]
    assert "moe/load" in found["experts"]
    assert "gradients/norm" in found["layers"]
    assert "updates/ratio" in found["layers"]
    assert "not saved: no space left" in found["checkpoints"]
    assert "300 ms" in found["checkpoints"]
    assert "def f(x):" in found["samples"]
    assert "weather" in found["other"]
    assert "weights/histogram" in found["other"]
    assert "nanotrain run <made-up>" in found["run"]
    assert "1,234,567 parameters" in found["run"]
    assert 'name = "made-up"' in found["recipe"]


def test_shares_of_the_time_since_the_start_are_the_newest(tmp_path):
    """Their median was of the middle of the run: a restart at three quarters of it had cost nothing."""
    share = partial(Metric, unit="1", group="reliability", summary="")
    run = MadeUp(tmp_path, steps=20, declared=[share(name="goodput"), share(name="lost/down")])
    run.start()
    for step in range(1, 21):
        run.step(step)
        down = 0.0 if step <= 15 else 0.25
        run.row("metrics", step=step, values={"goodput": 1 - down, "lost/down": down})
    found = Page(page([open_run(run.write())])).sections["continuity"]
    assert "training 75%" in found
    assert "down 25%" in found


@pytest.mark.full
def test_an_attempt_began_again_because_of_an_error_and_no_warning(tmp_path):
    run = MadeUp(tmp_path, steps=8)
    run.start()
    for step in range(1, 5):
        run.step(step)
    at = datetime.fromtimestamp(run.now, UTC).isoformat()
    said = [
        {"time": at, "rank": 2, "level": "error", "event": "run failed", "error": "ValueError('x < 0')"},
        {"time": at, "rank": 1, "level": "error", "event": "run failed", "error": "peer reset"},
        {"time": at, "rank": 0, "level": "warning", "event": "step 4: experts starve."},
    ]
    run.start(2)
    run.step(3)
    folder = run.write()
    log = folder / "run.log.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in said), encoding="utf-8")
    rows = " ".join(Page(page([open_run(folder)])).sections["continuity"].split())
    assert "4 2 2 run failed (ValueError('x < 0'))" in rows
    launcher = {"time": at, "rank": None, "level": "error", "event": "rank 2 failed first: x < 0"}
    log.write_text("".join(json.dumps(entry) + "\n" for entry in [*said, launcher]), encoding="utf-8")
    rows = " ".join(Page(page([open_run(folder)])).sections["continuity"].split())
    assert "4 2 2 rank 2 failed first: x < 0" in rows


def test_what_reads_checkpoints_says_so_meanwhile(monkeypatch):
    monkeypatch.setattr("nanotrain_core.run.progress_bar.OFTEN", 0.01)

    def verify():
        time.sleep(0.2)
        return ["a byte differs"]

    with structlog.testing.capture_logs() as logs:
        found = whole(SimpleNamespace(step=3, nbytes=2e9, verify=verify))
    assert found == "damaged: a byte differs"
    assert {entry["event"] for entry in logs} == {"verifying the checkpoint of step 3, 2 GB"}


def test_what_is_wrong_now_is_on_the_first_screen(tmp_path):
    run = MadeUp(tmp_path, steps=30)
    run.start()
    for step in range(1, 31):
        run.step(step, grad_norm=2000.0 if step > 25 else 200.0 if step < 6 else 1.0)
    found = Page(page([open_run(run.write())])).sections
    assert "Now: Gradients are very large" in found["answers"]
    run.step(31)
    found = Page(page([open_run(run.write())])).sections
    assert "Now:" not in found["answers"]
    assert "steps 1 to 5" in found["health"]
    assert "steps 26 to 30" in found["health"]


def test_what_no_monitor_recorded_is_said_in_a_line(tmp_path):
    run = MadeUp(tmp_path, declared=())
    run.start()
    for step in range(1, 5):
        run.step(step, expert_load=None)
    found = Page(page([open_run(run.write())])).sections
    for section, words in {"time": "spent on", "memory": "how full", "layers": "layer by layer"}.items():
        assert words in found[section]
    assert "no experts" in found["experts"]
    assert "No checkpoint was saved" in found["checkpoints"]
    assert "other" not in found


def test_curves_of_figures_are_those_of_the_run(full):
    run, text = full
    found = Page(text)
    held = [array for item in found.items for array in arrays(item)]
    loss = run.line("loss").values.astype(np.float32)
    assert any(len(array) == len(loss) and np.array_equal(array, loss, equal_nan=True) for array in held)
    largest = run.line("gradients/norm/layers.2.q.weight").values.max()
    assert any(np.isclose(np.nanmax(array), largest) for array in held if array.size > 300)
    spoken = "\n".join(found.labels)
    names = ("loss", "validation/loss", "grad_norm", "lr", "weather/wind", "updates/ratio/0")
    assert all(f"{name}: " in spoken for name in names)


def test_it_fetches_nothing_and_runs_no_script_of_a_run(full):
    found = Page(full[1])
    assert found.fetched == ["data:,"]
    assert not re.search(r"url\(|@import", "".join(found.styles))
    assert found.policy.startswith("default-src 'none'; script-src 'unsafe-inline'")
    assert found.policy.endswith("connect-src 'none'")
    assert found.scripts == len(found.items) + 2  # bokeh and the page's own: not the one in the sample
    assert "<b>plugin</b>" not in full[1]
    assert "<b>plugin</b>" in "".join(found.sections.values())


@pytest.mark.full
def test_several_runs_lie_over_each_other(tmp_path, full):
    short = full_run(tmp_path / "short", 40)
    text = page([full[0], open_run(short)])
    found = Page(text)
    assert "run" in found.sections["learning"]
    assert "short" in found.sections["learning"]
    lengths = [len(array) for array in arrays(found.items[0])]
    assert {300, 40} <= {*lengths}
    assert len(text) < 3e6


@pytest.mark.parametrize("state", ["no rows", "start only", "torn"])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, state):
    run = MadeUp(tmp_path)
    if state != "no rows":
        run.start()
    run.write(torn="" if state == "start only" else '{"event": "st')
    assert "No step has been logged yet" in Page(page([open_run(tmp_path)])).sections["learning"]


@pytest.mark.full
def test_ten_thousand_steps_stay_small(tmp_path):
    text = page([open_run(full_run(tmp_path, 10_000))])
    assert len(text.encode()) < 5e6
    held = [array for item in Page(text).items for array in arrays(item)]
    assert max(len(array) for array in held) <= 24_000


def test_the_command_writes_a_file_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = MadeUp(tmp_path / "runs" / "one", steps=2, declared=())
    run.start()
    run.step(1)
    run.step(2)
    run.write()
    assert main(["report", "runs/one"]) == 0
    assert capsys.readouterr().out == "runs/one/report.html\n"
    assert Page((tmp_path / "runs/one/report.html").read_text()).items
    assert main(["report", "runs/one", "--out", "new/x.html"]) == 0
    assert (tmp_path / "new" / "x.html").exists()
    assert main(["report", "runs/one", "--out", "runs/one/metrics.jsonl/x.html"]) == 2
    assert "name another with --out" in capsys.readouterr().err
    os.mkfifo("pipe")
    assert main(["report", "runs/one", "--out", "pipe"]) == 2
    told = "nanotrain: pipe: expected a file, this is a device, pipe or socket; name another with --out\n"
    assert capsys.readouterr().err == told
    Path("link.html").symlink_to("new/x.html")
    Path("new/x.html").write_text("old")
    assert main(["report", "runs/one", "--out", "link.html"]) == 0
    assert Path("link.html").is_symlink()
    assert Path("new/x.html").read_text() != "old"
    capsys.readouterr()
    for option in (
        ["--out", "x.html"],
        ["--verify"],
    ):  # what a served page does not do is not left out in silence
        assert main(["report", "runs/one", "--serve", *option]) == 2
        assert f"{option[0]} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("runs/onee", "there is no such folder (did you mean 'runs/one'?)"),
        ("runs", "runs is no run folder: it has none of metrics.jsonl"),
        ("runs", "it holds runs: runs/one"),
        ("runs/one/metrics.jsonl", "is a file, not a run's folder"),
    ],
)
@pytest.mark.parametrize("command", ["report", "top"])
def test_a_folder_that_is_no_run_is_refused_in_a_line(tmp_path, capsys, monkeypatch, command, path, text):
    monkeypatch.chdir(tmp_path)
    full_run(tmp_path / "runs" / "one", 10)
    assert main([command, path]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert len(err.splitlines()) == 1


def test_the_recipe_is_the_newest_that_the_run_wrote(tmp_path):
    """A longer name had won, of a file that somebody put there."""
    run = full_run(tmp_path, 4)
    for name in ("recipe-2", "recipe-10", "recipe-9", "recipe-10-old", "recipe-next-try", "recipes"):
        (run / f"{name}.toml").write_text(f'[run]\nname = "{name}"\n')
    assert open_run(run).recipe["run"]["name"] == "recipe-10"


def test_files_that_others_wrote_or_changed_cost_what_cannot_be_shown_and_no_more(tmp_path):
    run = MadeUp(tmp_path, steps=9)
    run.start()
    names = ("x/<b>bold</b>", "[red]m[/red]", "", "/", "a/{b}", "../../etc", "b{c}/d", "memory/peak/rank")
    for step in range(1, 4):
        run.step(step)
        run.row("metrics", step=step, values={name: float(step) for name in names})
    (tmp_path / "samples.jsonl").write_text(
        '{"step": null, "text": "one"}\n{"step": "x", "text": 5}\n{}\n{"step": 3, "text": "three"}\n'
    )
    folder = run.write()
    recipe = 'run = 3\nmonitor = "x"\nbatch = [1]\nversions = "y"\n[model]\nuse = "transformer"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    opened = open_run(folder)
    assert {*opened.lines} >= {*names}
    assert opened.recipe == {"model": {"use": "transformer"}}
    text = page([opened])
    found = Page(text).sections
    assert "after step 3" in found["samples"]
    assert "three" in found["samples"]
    assert "one" not in found["samples"]
    assert "<b>bold</b>" not in text
    Console(file=io.StringIO(), width=100).print(screen(opened, 100))
