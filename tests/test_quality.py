"""What a precision costs in loss is measured on the same tokens, read once, and told with its error."""

import json
from functools import partial

import attrs
import pytest

from benchmarks.gap import Gap
from benchmarks.quality import RECIPE, main, recipe_of, train, twentieths
from benchmarks.quality_table import AGAIN, Plan, Trained, read, tables
from nanotrain_core.errors import DataError
from nanotrain_core.recipe import check_combination
from nanotrain_core.registry.registry import load_plugins

SMALL = (
    "batch.length=32",
    "batch.microbatch=4",
    "evaluation.sequences=8",
    "model.layers=2",
    "model.mtp=0",
    f"data.paths=['{RECIPE.parent}']",
)
FP8 = "fp8_deepseek_v3"
small = partial(Plan, seed=1, steps=2, changes=SMALL)


def test_a_file_gets_each_run_once_and_its_table_needs_no_training(tmp_path, capsys):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text("<!-- quality: begin -->\n<!-- quality: end -->\n")
    arguments = ["--runs", str(file), "--steps", "2", "--seeds", "1"]
    arguments += [word for change in SMALL for word in ("--set", change)]
    assert main([*arguments, "--precisions", "bf16"]) == 0
    first = file.read_text()
    assert main([*arguments, "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert main(["--table", str(file)]) == 0
    assert printed.endswith(capsys.readouterr().out)
    assert tables(read(file)) in page.read_text()

    assert file.read_text().startswith(first)
    wide, narrow, again = read(file)
    assert [run.plan.precision for run in (wide, narrow, again)] == ["bf16", FP8, AGAIN]
    assert wide.tokens == 2 * 8 * 32
    assert wide.held_out_tokens == 8 * 32
    losses = [wide.training[0], narrow.training[0], again.training[0]]
    assert len(set(losses)) == 3
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    # The same model to start with, but for chance: its loss is that of guessing.
    assert json.loads(first)["next_token"][0] == pytest.approx(5.5, abs=0.1)


@pytest.mark.full
def test_precisions_part_after_steps_that_bfloat16_made_for_all(tmp_path):
    plans = [small(name, steps=4, after=2) for name in ("bf16", FP8, AGAIN)]
    wide, narrow, again = (train(plan, tmp_path) for plan in plans)
    (kept,) = tmp_path.glob("*/checkpoints/step-00000002.safetensors")
    straight = train(small("bf16", steps=4))
    assert wide.training == straight.training[2:]
    assert wide.held_out == straight.held_out
    assert len({run.training[0] for run in (wide, narrow, again)}) == 3
    assert again.training[0] == pytest.approx(wide.training[0], rel=1e-4)
    assert kept.exists()
    assert "made once in bf16" in tables([wide, narrow, again])


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("tp=2", {"tp": 2}),
        ("dp=2,ep=2", {"dp": 2, "ep": 2}),
        ("pp=2", {"pp": 2}),
        ("dp=2,zero=2", {"dp": 2}),
        ("pp=2,tp=2,ep=2,zero=2", {"pp": 2, "tp": 2, "ep": 2}),
    ],
)
def test_a_layout_changes_who_trains_and_nothing_of_the_training(layout, sizes):
    plan = small("bf16", layout=layout, changes=(*SMALL, "optimizer.lr=0.002"))
    here, there = recipe_of(attrs.evolve(plan, layout="")), recipe_of(plan)
    found = check_combination(there, load_plugins())
    assert {dim: found.size(dim) for dim in ("pp", "dp", "tp", "ep") if found.size(dim) > 1} == sizes
    assert (there.batch, there.model, there.data) == (here.batch, here.model, here.data)
    for field in ("lr", "lr_schedule", "weight_decay", "clip_norm", "betas", "eps"):
        assert getattr(there.optimizer.config, field) == getattr(here.optimizer.config, field)
    assert there.optimizer.use == ("zero12" if "zero" in layout else "adamw")


def test_text_that_would_be_read_twice_is_refused_before_training():
    with pytest.raises(DataError, match="100000000 steps read 800000000 sequences, but there are"):
        train(small("bf16", steps=10**8))


def test_a_curve_has_the_mean_of_each_twentieth():
    assert twentieths([1.0, 2.0, 3.0]) == (1.0, 2.0, 3.0)
    assert twentieths([float(step) for step in range(40)]) == tuple(0.5 + 2 * point for point in range(20))
    assert twentieths([float(step) for step in range(50)])[:4] == (0.5, 3.0, 5.5, 8.0)


def made(precision, seed, end, *, layout=""):
    """A run whose losses are 3, but in its last fifth."""
    curve = (3.0,) * 16 + (end,) * 4
    plan = Plan(precision, seed, 100, layout)
    about = {"model": "a model", "text": "text", "tokens": 5, "held_out_tokens": 7, "seconds": 1.0}
    return Trained(plan=plan, training=curve, next_token=curve, held_out=2 * end, **about)


def test_gaps_are_of_the_last_fifth_to_the_mean_of_both_bfloat16_runs_of_the_seed():
    ends = {"bf16": (2.0, 1.0), AGAIN: (2.02, 1.02), FP8: (2.01 * 1.01, 1.01 * 1.02)}
    text = tables([made(name, seed, end[seed - 1]) for name, end in ends.items() for seed in (1, 2)])
    rows = {cells[1]: cells[2:] for cells in cells_of(text)}
    assert rows["bf16"][:3] == ["1.5000", "", ""]
    # Two seeds leave one degree of freedom, whose quantile is 12.706; (1.96 * 0.7071 / 0.25)² is 30.7.
    judged = "-4.85 to +7.85: not decided (31 seeds for ± 0.25%)"
    fifths = "+0.00, +0.00, +0.00, +0.00, +1.50"
    assert rows[FP8][1:5] == ["+1.50 ± 0.50", "+1.00, +2.00", fifths, judged]
    assert rows[AGAIN][1:5] == ["+1.50 ± 0.50", "+1.00, +2.00", fifths, ""]


@pytest.mark.parametrize(("gaps", "word"), [((0.001, 0.0011), "met"), ((0.01, 0.0101), "not met")])
def test_a_bar_is_judged_by_the_whole_interval(gaps, word):
    runs = [made("bf16", 1, 1.0), made("bf16", 2, 1.0)]
    runs += [made(FP8, seed, 1 + gap) for seed, gap in enumerate(gaps, 1)]
    assert cells_of(tables(runs))[-1][6].endswith(f": {word}")


def test_a_layout_is_compared_with_its_own_bfloat16_and_with_one_process():
    runs = [made("bf16", 1, 1.0), made(FP8, 1, 1.01)]
    runs += [made("bf16", 1, 1.1, layout="tp=2"), made(FP8, 1, 1.1 * 1.02, layout="tp=2")]
    rows = {tuple(cells[1:3]): cells for cells in cells_of(tables(runs))}
    assert rows["one process", FP8][4] == "+1.00"
    assert rows["tp=2", FP8][4] == "+2.00"
    assert rows["tp=2", "bf16"][-2] == "10.00"
    assert rows["tp=2", FP8][-2] == "11.09"


def test_an_interval_is_as_wide_as_student_says():
    low, high = Gap((1.0, 2.0, 3.0, 4.0)).interval
    assert (low, high) == pytest.approx((2.5 - 3.182 * 0.6455, 2.5 + 3.182 * 0.6455), abs=1e-3)


def cells_of(text):
    """The cells of a table's lines, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.split("|")] for line in lines]
