"""docs/recipes.md says what the code does."""

import re
from pathlib import Path

import attrs
import pytest
from recipe_files import write

from nanotrain_core.component import KINDS, LISTED_KINDS
from nanotrain_core.contracts import StepReport
from nanotrain_core.errors import Exit
from nanotrain_core.monitors.lines import step_fields
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import DEFAULT_USE, BatchConfig, EvaluationConfig, RunConfig

TEXT = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its two head lines."""
    section = TEXT.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_exit_codes_are_those_of_the_program():
    codes = {name.lower(): code for name, code in vars(Exit).items() if name.isupper()}
    assert {name: int(code) for code, name, _ in rows("## Exit codes")} == codes


@pytest.mark.parametrize(
    ("heading", "config"),
    [("### [run]", RunConfig), ("### [batch]", BatchConfig), ("### [evaluation]", EvaluationConfig)],
)
def test_keys_and_defaults_are_those_of_the_core(heading, config):
    def shown(default) -> str:
        if default is attrs.NOTHING or default is None:
            return "required" if default is attrs.NOTHING else "unset"
        return f'"{default}"' if isinstance(default, str) else str(default).lower()

    expected = {field.name: shown(field.default) for field in attrs.fields(config)}
    assert {key: default for key, default, _ in rows(heading)} == expected


def test_default_components_are_those_of_the_core():
    told = {section.strip("[]"): default for section, default, _ in rows("### Components")}
    assert set(told) == set(KINDS)
    for kind, uses in DEFAULT_USE.items():
        names = uses if kind in LISTED_KINDS else (uses,)
        assert told[kind] == (", ".join(names) or "none")
    assert told["model"] == "required"


def test_every_field_of_a_step_line_is_explained():
    report = StepReport(
        step=1,
        loss=2.0,
        losses={"lm": 1.0, "mtp": 1.0, "seq_balance": 1.0},
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        tokens_per_second=1.0,
        seconds=1.0,
        loss_scale=2.0,
        skipped=True,
        expert_load=1.0,
        bubble=0.1,
    )
    told = [name for cell, _ in rows("## What a step's line says") for name in cell.split(", ")]
    assert [name for name in told if name != "..."] == list(step_fields(report, steps=2, mfu=0.5))


def test_the_phases_of_the_page_can_run(tmp_path):
    (block,) = re.findall(r"## Phases of a run\n\n```toml\n(.*?)```", TEXT, flags=re.DOTALL)
    recipe = load_recipe(write(tmp_path, f'extends = "deepseek_v3_671b"\n{block}'))
    assert [phase.name for phase in recipe.phase] == ["growing batch", "", "decay", ""]


def test_the_whole_recipe_of_the_page_can_run(tmp_path):
    (block,) = re.findall(r"```toml\n(# tried.*?)```", TEXT, flags=re.DOTALL)
    assert load_recipe(write(tmp_path, block)).run.ranks == 2
