"""The short form of the fault matrix, and what its judge makes of a ledger."""

import json
from random import Random
from types import SimpleNamespace

import pytest
import torch
from test_run import SMALL

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Settings, Trial
from nanotrain_core.testing.chaos.inject import VARIABLE, ChaosConfig, Order, build
from nanotrain_core.testing.chaos.matrix import ROWS, chosen
from nanotrain_core.testing.chaos.row import Outcome, Row, judge

RECIPE = SMALL.replace("width = 16", "width = 64").replace("sequences = 4", "sequences = 8", 1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A bench whose undisturbed run is made once."""
    root = tmp_path_factory.mktemp("chaos")
    (root / "small.toml").write_text(RECIPE)
    settings = Settings(recipe=str(root / "small.toml"), steps=16, every=4, hang_timeout=6.0)
    return Bench(settings, root / "runs")


#: Hangs, signals, flipped bits and memory snapshots have tests of their own: ``test_hang.py``,
#: ``test_run.py``, the harness of checkpoints, and ``test_memory_snapshots.py``.
ELSEWHERE = ("HangStopped", "TerminateLauncher", "FlipBit", "NanOnce", "KillBesideMemory")
SHORT = [
    pytest.param(row, marks=[pytest.mark.full] * (row.__name__ in ELSEWHERE), id=row.__name__)
    for row in chosen((), short=True)
]


@pytest.mark.full_cases("KillFirst", "BadRecipe")
@pytest.mark.parametrize("row", SHORT)
def test_is_survived(bench, row):
    if why := row.not_here(bench):
        pytest.skip(why)
    outcome = row().run(bench, row.__name__, Random(1))
    assert outcome.problems == []
    assert (outcome.false_successes, outcome.replay_mismatches) == (0, 0)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if not row.short], ids=lambda row: row.__name__)
def test_is_survived_too(bench, row):
    if why := row.not_here(bench):
        pytest.skip(why)
    assert row().run(bench, row.__name__, Random(1)).problems == []


# --- what is refused before anything runs, and a format of another's ----------------------------------

MINE = '''
import attrs
from pathlib import Path
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    """A checkpoint without a listing."""
    {key}: int = 5

@hookimpl
def nanotrain_register_checkpoint(register):
    register(Component(name="mine", config=Config, factory=f"{{__name__}}:Mine"))
'''


def mine(folder, key):
    """Write a recipe that saves with a component of a key, and the plugin that has it."""
    saving = 'use = "simple"\nevery = 3\nkeep = 9\n'
    assert saving in RECIPE
    (folder / "recipe.toml").write_text(RECIPE.replace(saving, 'use = "mine"\n'))
    (folder / "mine.py").write_text(MINE.format(key=key))
    return str(folder / "recipe.toml"), str(folder / "mine.py")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--only", "18"], "checkpoint.every, and 'mine' has no such key; valid: interval"),
        (["--only", "kil", "--only", "rocks"], "--only rocks: no such row; expected a number or a part of"),
        (["--only", "18", "--keep", "."], "--keep .: it is not empty; expected a new folder"),
    ],
)
def test_is_refused(tmp_path, capsys, monkeypatch, words, text):
    recipe, plugin = mine(tmp_path, "interval")
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", recipe, "--plugin", plugin, *words]) == Exit.USER
    assert text in capsys.readouterr().err


def test_a_row_that_needs_more_ranks_says_so_and_a_matrix_without_rows_is_no_success(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(RECIPE)
    assert main(["chaos", str(tmp_path / "small.toml"), "--only", "in-process"]) == 1
    text = "28 in-process restart: kill -9 a random rank: not run here: needs 2 ranks (--nproc)"
    assert text in capsys.readouterr().out


def test_a_checkpoint_without_a_listing_is_found_where_it_was_announced(tmp_path):
    recipe, plugin = mine(tmp_path, "every")
    bench = Bench(Settings(recipe=recipe, plugins=(plugin,), every=2), tmp_path / "runs")
    assert bench.recipe().checkpoint.config.every == 2
    trial = Trial(bench, "hurt")
    saved = {step: trial.folder / "checkpoints" / f"of-{step}" / "all" for step in (2, 4)}
    for path in saved.values():
        path.parent.mkdir(parents=True)
        path.write_text("all")
    rows = [(0, 0, "checkpoint", {"step": step, "path": str(path.parent)}) for step, path in saved.items()]
    ledger(trial, rows)
    assert trial.saved_files() == [saved[4]]


# --- the judge --------------------------------------------------------------------------------------


class Nothing(Row):
    number, name = "0", "nothing"

    def hurt(self, trial, random):
        return iter(())


def test_a_gradient_of_a_zero_bubble_schedule_turns_nan_too(tmp_path, monkeypatch):
    order = Order(ledger=str(tmp_path), act="nan", step=1)
    monkeypatch.setenv(VARIABLE, order.text())
    monitor = build(ChaosConfig())
    mesh = SimpleNamespace(gather=lambda value: [value])
    data = SimpleNamespace(train_batch=None, validation_batch=None)
    weight = SimpleNamespace(parameter=torch.nn.Parameter(torch.ones(1)))
    run = SimpleNamespace(rank=0, first_step=0, world_size=1, mesh=mesh, data=data, placed=[weight])
    monitor.on_start(run)
    assert monitor.gradient(None) is None  # of the backward pass, before the pass W that computes it
    assert monitor.struck == 0
    weight.parameter.backward(torch.ones(1))
    monitor.hook.remove()
    monitor.file.close()
    assert weight.parameter.grad.isnan().all()


def ledger(trial, rows):
    """Write a ledger as rank 0 would: rows of (event, step, more) of launches and attempts in order."""
    lines = []
    for time, (launch, attempt, event, fields) in enumerate(rows):
        where = {"launch": launch, "attempt": attempt, "time": time, "rank": 0}
        lines.append(json.dumps({"event": event, **where, **fields}))
    (trial.ledger / "rank-0.jsonl").write_text("\n".join(lines) + "\n")


def steps(launch, attempt, first, last, *, loss="0x1p+0", rows=None):
    yield launch, attempt, "start", {"first_step": first - 1}
    for step in range(first, last + 1):
        yield launch, attempt, "batch", {"step": step, "rows": rows or [f"row {step}"]}
        yield launch, attempt, "step", {"step": step, "loss": loss, "skipped": False}


END = {"reason": "done", "weights": "aa"}


def judged(tmp_path, rows):
    """Judge a ledger against an undisturbed run of 6 steps."""
    bench = Bench(Settings(recipe="none", steps=6, every=2), tmp_path)
    whole = Trial(bench, "baseline")
    ledger(whole, [*steps(0, 0, 1, 6), (0, 0, "end", END)])
    bench.__dict__["baseline"] = whole
    trial = Trial(bench, "trial")
    ledger(trial, rows)
    outcome = Outcome([])
    judge(Nothing(), trial, outcome)
    return outcome


def test_a_restart_that_repeats_two_steps_is_survived(tmp_path):
    rows = [*steps(0, 0, 1, 4), *steps(0, 1, 3, 6), (0, 1, "end", END)]
    outcome = judged(tmp_path, rows)
    assert (outcome.problems, outcome.steps_lost) == ([], 2)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([*steps(0, 0, 1, 4), *steps(0, 1, 1, 6), (0, 1, "end", END)], "4 steps were lost, at most 2"),
        ([*steps(0, 0, 1, 6), (0, 0, "end", {**END, "weights": "bb"})], "the final weights are not those"),
        ([*steps(0, 0, 1, 4), *steps(0, 1, 3, 6, loss="0x1p+1"), (0, 1, "end", END)], "4 steps had another"),
        ([*steps(0, 0, 1, 4), *steps(0, 1, 3, 6, rows=["row 1"]), (0, 1, "end", END)], "4 steps saw other"),
        ([*steps(0, 0, 1, 4), *steps(0, 1, 6, 6), (0, 1, "end", END)], "1 steps saw other"),
        ([*steps(0, 0, 1, 6)], "the final weights are not those"),
    ],
)
def test_what_a_run_lost_is_counted(tmp_path, rows, problem):
    assert any(problem in text for text in judged(tmp_path, rows).problems)
