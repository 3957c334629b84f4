"""What is listed as wrong lasted as long as the monitor ``health`` would have waited, and no less."""

import math

import pytest
from made_up import CLIP, MadeUp
from nanotrain_report.findings import findings, open_findings
from nanotrain_report.folder import open_run


def found(folder, values, recipe="", change=lambda step: {}):
    """Return what is listed of a run with these clip coefficients, and what is wrong now."""
    run = MadeUp(folder, steps=len(values), declared=[CLIP])
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text() + recipe)
    run.start()
    for step, value in enumerate(values, start=1):
        run.step(step, **change(step))
        run.row("metrics", step=step, values={CLIP.name: value})
    opened = open_run(run.write())
    return [f"{s.text} {s.when}" for s in findings(opened)], [s.text for s in open_findings(opened)]


@pytest.mark.parametrize(
    ("wrong", "recipe", "listed"),
    [
        ([0.0621], "", None),
        ([0.0621] * 4, "", None),
        ([0.0621] * 5, "", "steps 1 to 5"),
        ([0.0621, 0.5] * 10, "", None),  # comes and goes
        ([0.005], "", None),
        ([0.005] * 2, "", "steps 1 to 2"),
        ([math.nan], "", "step 1"),
        ([0.0621] * 2, '[[monitor]]\nuse = "health"\npatience = 2\n', "steps 1 to 2"),
        ([0.0621] * 5, '[[monitor]]\nuse = "health"\npatience = 6\n', None),
    ],
)
def test_a_value_is_listed_once_it_has_lasted(tmp_path, wrong, recipe, listed):
    of_run, now = found(tmp_path, [*wrong, *[0.9] * 20], recipe)
    assert now == []
    assert len(of_run) == (listed is not None)
    assert listed is None or of_run[0].rpartition(" (")[0].endswith(listed) or of_run[0].endswith(listed)


def test_what_is_wrong_now_has_lasted_too(tmp_path):
    assert found(tmp_path / "4", [*[0.9] * 20, *[0.05] * 4])[1] == []
    assert found(tmp_path / "5", [*[0.9] * 20, *[0.05] * 5])[1] == ["Gradients are clipped to 0.05."]


@pytest.mark.parametrize(("scale", "listed"), [(1024.0, 0), (1.0, 1)])
def test_gradients_of_a_step_that_a_loss_scale_skipped_are_not_judged(tmp_path, scale, listed):
    """Of a scale of 1 nothing is left to halve: then a gradient that is no number is one."""

    def change(step):
        return {"skipped": step in (3, 9), "loss_scale": scale}

    values = [math.nan if step in (3, 9) else 0.9 for step in range(1, 21)]
    assert len(found(tmp_path, values, change=change)[0]) == listed


def test_beside_a_loss_that_is_no_number_nothing_else_is_judged(tmp_path):
    values = [math.nan if step == 3 else 0.9 for step in range(1, 21)]
    (only,), _ = found(tmp_path, values, change=lambda step: {"loss": math.nan} if step == 3 else {})
    assert "loss" in only.lower()
    assert "no number" not in only.lower()
