"""`nanotrain check` reads the modules of the recipe's model: it refuses what ranks would, nothing else."""

import attrs
import pytest
import test_lora_layouts as lora
import test_qlora_layouts as qlora

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit
from nanotrain_core.recipe import write_resolved


def check(case, tmp_path, capsys):
    """Return the exit code of ``nanotrain check`` and its errors."""
    (tmp_path / "recipe.toml").write_text(write_resolved(case.recipe()))
    return main(["check", str(tmp_path / "recipe.toml")]), capsys.readouterr().err


@pytest.mark.parametrize("layout", lora.LAYOUTS, ids=str)
def test_every_layout_that_trains_adapters_is_accepted(layout, tmp_path, capsys):
    case = lora.with_lora(attrs.evolve(lora.PLAIN, **layout), {"targets": ["attn", "o"]})
    code, errors = check(case, tmp_path, capsys)
    assert code == Exit.DONE, errors


@pytest.mark.parametrize("layout", qlora.LAYOUTS, ids=str)
def test_every_layout_that_trains_beside_nf4_is_accepted(layout, tmp_path, capsys):
    code, errors = check(qlora.case_of(layout), tmp_path, capsys)
    assert code == Exit.DONE, errors


def test_adapters_before_tp_are_refused(tmp_path, capsys):
    case = lora.with_lora(attrs.evolve(lora.PLAIN, tp=2))
    wrappers = case.overrides["parallel"][::-1]
    code, errors = check(
        attrs.evolve(case, overrides={**case.overrides, "parallel": wrappers}), tmp_path, capsys
    )
    assert code == Exit.USER
    assert "parallel.1: 'lora' is listed before 'tp', which splits layers.0.attn.q over tp = 2" in errors


def test_adapters_of_what_tp_does_not_split_may_come_before_it(tmp_path, capsys):
    """DeepSeek's projections to the latent are whole on every rank."""
    targets = {"targets": ["kv_a"]}
    case = lora.with_lora(attrs.evolve(lora.PLAIN, tp=2, model="deepseek_v3"), targets)
    wrappers = sorted(case.overrides["parallel"], key=lambda each: each["use"] != "lora")
    code, errors = check(
        attrs.evolve(case, overrides={**case.overrides, "parallel": wrappers}), tmp_path, capsys
    )
    assert code == Exit.DONE, errors


@pytest.mark.parametrize(
    ("layout", "width", "block", "wanted"),
    [
        ({}, 48, 32, "rows of layers.0.attn.q.weight, 48 weights on a rank, and those of"),
        ({"model": "moe"}, 40, 16, "rows of layers.0.attn.q.weight, 40 weights on a rank, and"),
        ({"dp": 2}, 96, 32, None),
    ],
)
def test_widths_without_whole_blocks_are_refused(layout, width, block, wanted, tmp_path, capsys):
    case = qlora.case_of(layout, block_size=block)
    model = {**case.overrides["model"], "width": width, "heads": 4, "head_size": 16}
    code, errors = check(attrs.evolve(case, overrides={**case.overrides, "model": model}), tmp_path, capsys)
    assert code == (Exit.USER if wanted else Exit.DONE), errors
    assert wanted is None or f"precision.block_size: {wanted}" in errors
