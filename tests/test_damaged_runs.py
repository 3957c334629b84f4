"""Run folders that were damaged at random are shown or refused: never a traceback, never for long."""

import json
import socket
import time
import tomllib
from pathlib import Path
from random import Random

import pytest
import tomli_w
from damage import hurt, hurt_bytes, writable
from made_up import DECLARED, MadeUp
from nanotrain_inspect.experts import loads_of, loads_told

from nanotrain_core.api import Metric, Rule
from nanotrain_core.cli import main
from nanotrain_core.cli.replay import final_loss
from nanotrain_core.metrics.history import last_attempt
from nanotrain_core.recipe import resolve_recipe, write_resolved

#: With a pipeline, whose timeline is drawn.
CHANGED = ["topology.pp=2", "run.ranks=4", "schedule.use='1f1b'", "run.steps=6"]
#: Beside those of made-up runs: what has sections of its own.
MORE = (
    *(
        Metric(name=f"memory/reserved_peak/{over}", unit="bytes", group="memory", summary="of a rank")
        for over in ("max", "mean", "median", "rank")
    ),
    Metric(name="memory/ranks", unit="bytes", group="memory", kind="histogram", summary="of each rank"),
    Metric(name="slow", unit="s", group="time", summary="", rule=Rule(warn_times=2.0, high="slow: {times}")),
)


def write_run(folder):
    """Write the folder of a run that was resumed and rolled back, with everything that a report shows."""
    run = MadeUp(folder, steps=6, declared=(*DECLARED, *MORE))
    run.start()
    for step in (*range(1, 5), *range(3, 7)):
        if step == 3 and run.attempt == 1 and run.rows[-1]["step"] == 4:
            run.start(2)
        run.step(step)
        run.rich(step, layers=2, experts=2, slow=0.1, goodput=0.5, **{"lost/restarts": 0.5})
        values = run.rows[-1]["values"]
        values |= {f"memory/reserved_peak/{over}": 1e9 for over in ("max", "mean", "median")}
        values |= {"memory/reserved_peak/rank": 1.0, "moe/balance/layers.0.moe.router": 0.9}
        known = {"below": 0, "above": 0, "nan": 0}
        loads = {"edges": [0.0, 1.0, 2.0], "counts": [3.0, 1.0], **known}
        values = {"edges": [float(n) for n in range(5)], "counts": [1e9, 2e9, 1e9, 1e9], **known}
        run.rows[-1]["histograms"] |= {
            "moe/load/layers.0.moe.router": loads,
            "moe/load/layers.1.moe.router": loads,
            "memory/ranks": values,
        }
        run.rows[-1]["texts"] = {"health": "one rank is slow"}
        run.row("evaluation", step=step, loss=3.0, bits_per_byte=1.0, tokens=9)
        run.row("checkpoint", step=step, path=f"x/step-{step}", seconds=0.3, blocked=0.1)
    run.row("save_failed", step=6, problem="no space left", in_a_row=1)
    run.attempt += 1
    run.row("rollback", step=6, onset=6, restored=5, skipped=[1, 2], count=1, reason="loss was NaN")
    run.step(6)
    run.row("end", step=6, reason="done", tokens=9)
    run.write()
    recipe = resolve_recipe("laptop", overrides=CHANGED).recipe
    (folder / "recipe.toml").write_text(write_resolved(recipe))
    (folder / "recipe.explained").write_text(write_resolved(recipe))
    stamp = {"time": "2027-01-15T08:00:00+00:00", "step": 3}
    log = [
        {"level": "info", "event": "run begins", "rank": 0, "command": "nanotrain run x", "host": "here"},
        {"level": "warning", "event": "slow", "rank": 1, "monitor": "M", "on_rank": 1},
        {"level": "error", "event": "rank 2 was killed", "rank": None, "exception": "a\nValueError: b"},
        {"level": "error", "event": "gone", "rank": 2, "error": "why"},
    ]
    lines = [json.dumps({**stamp, "cpus": 2, "local_ranks": 4, **entry}) for entry in log]
    (folder / "run.log.jsonl").write_text("\n".join(lines) + "\n")
    sample = {"step": 6, "prompt": "def ", "text": "def f(): ..."}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22}))
    return folder


FILES = (*["metrics.jsonl"] * 6, *["recipe.toml"] * 2, *["run.log.jsonl"] * 2, "samples.jsonl", ".lock")


def damage(path, random):
    """Damage a file of a run, and return in words what was done."""
    if random.random() < 0.1:
        path.write_bytes(hurt_bytes(path.read_bytes(), random))
        return "bytes"
    if path.suffix == ".toml":
        table = tomllib.loads(path.read_text())
        said = hurt(table, random)
        path.write_text(tomli_w.dumps(writable(table)))
        return said
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    number = random.randrange(len(rows))
    said = hurt(rows, random) if random.random() < 0.1 else f"row {number}: {hurt(rows[number], random)}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return said


def read_by_all(folder, other):
    """Call everything that reads a run folder; reports only with another run to compare it with."""
    assert main(["top", str(folder), "--once"]) in (0, 2)
    for words in ([folder], [folder, other, "--out", other / "x"]) if other else ():
        assert main(["report", *map(str, words)]) in (0, 2)
    [*loads_told(loads_of(folder))]
    assert isinstance(final_loss(folder, 3), float | None)
    assert last_attempt(folder / "metrics.jsonl") >= 0


@pytest.fixture
def quick(monkeypatch):
    """Pages without bokeh's script of 1 MB, and its JSON of each figure, which takes most of the time."""
    monkeypatch.setattr("nanotrain_report.html.bokeh_script", lambda: "")
    monkeypatch.setattr("nanotrain_report.blocks.Chart.item", lambda self: "{}")


def read_all_damaged(tmp_path, seeds, reports):
    """Damage a run folder as each seed has it, and have it read; every so many of them by ``report``, too."""
    whole = write_run(tmp_path / "whole")
    texts = {name: (whole / name).read_bytes() for name in {*FILES, "recipe.explained"}}
    folder = tmp_path / "damaged"
    folder.mkdir()
    for seed in seeds:
        random, said = Random(seed), []
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        for name in random.sample(sorted({*FILES}), random.randrange(1, 4)):
            said.append(f"{name}: {damage(folder / name, random)}")
        began = time.monotonic()
        try:
            read_by_all(folder, whole if seed % reports == 0 else None)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {said}") from problem
        assert time.monotonic() - began < 60, f"seed {seed}: {said}"


def test_a_damaged_run_folder_is_shown_or_refused(tmp_path, quick):
    read_all_damaged(tmp_path, range(40), reports=40)


@pytest.mark.full
def test_a_hundred_damaged_run_folders_are_shown_or_refused(tmp_path):
    read_all_damaged(tmp_path, range(40, 140), reports=1)


def changed(folder, file, number, way, value):
    """Change one value of a row, and return the folder."""
    rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    place = rows[number]
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("file", "number", "way", "value", "told"),
    [
        ("metrics.jsonl", 5, ["seconds"], "soon", True),
        ("metrics.jsonl", 5, ["path"], None, True),
        ("metrics.jsonl", 0, ["world_size"], 10**12, False),
        ("metrics.jsonl", 0, ["parameters"], "many", True),
        ("metrics.jsonl", 0, ["steps"], [6], True),
        ("metrics.jsonl", 3, ["histograms", "moe/load/layers.0.moe.router", "counts"], [], True),
        ("metrics.jsonl", 3, ["histograms", "moe/load/layers.0.moe.router", "counts"], [1.0], True),
        ("metrics.jsonl", 3, ["histograms", "moe/load/layers.0.moe.router", "edges"], [], True),
        ("metrics.jsonl", 3, ["histograms", "memory/ranks", "counts"], ["x"] * 4, True),
        ("metrics.jsonl", 3, ["values", "slow"], "fast", True),
        ("metrics.jsonl", 3, ["texts", "health"], 3, True),
        ("metrics.jsonl", 1, ["metrics", 0, "rule"], {"bad_above": "9"}, True),
        ("metrics.jsonl", 11, ["step"], 0, True),
        ("metrics.jsonl", -1, ["time"], float("inf"), True),
        ("run.log.jsonl", 0, ["local_ranks"], "all", False),
        ("run.log.jsonl", 3, ["event"], None, False),
        ("run.log.jsonl", 3, ["rank"], [0], False),
        (".lock", 0, ["pid"], 10**30, False),
    ],
)
def test_what_cannot_be_read_is_left_out_and_told(tmp_path, capsys, file, number, way, value, told):
    folder = changed(write_run(tmp_path), file, number, way, value)
    assert main(["top", str(folder), "--once"]) == 0
    assert ("1 line of metrics.jsonl that cannot be read" in capsys.readouterr().out) == told
    assert loads_of(folder)["layers.0.moe.router"].shares == (0.75, 0.25)  # of another row


def test_a_report_leaves_out_and_tells_what_cannot_be_read(tmp_path, quick):
    """The seconds of a checkpoint had ended it with a TypeError, and a histogram with an IndexError."""
    folder = changed(write_run(tmp_path), "metrics.jsonl", 5, ["seconds"], "soon")
    changed(folder, "metrics.jsonl", 3, ["histograms", "moe/load/layers.0.moe.router", "counts"], [])
    changed(folder, "metrics.jsonl", 7, ["histograms", "memory/ranks", "counts"], [1.0])
    changed(folder, "run.log.jsonl", 0, ["local_ranks"], "all")
    assert main(["report", str(folder)]) == 0
    assert "3 lines of metrics.jsonl that cannot be read" in (folder / "report.html").read_text()


def test_a_recipe_that_cannot_be_read_is_named(tmp_path, quick, monkeypatch):
    """One with a secret is its owner's alone; the root of these tests may read all."""
    folder = write_run(tmp_path)
    read = Path.read_text

    def refused(path, *args, **options):
        if path.name.startswith("recipe."):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert main(["report", str(folder)]) == 0
    assert f"{folder / 'recipe.explained'} cannot be read: Permission denied." in read(folder / "report.html")
