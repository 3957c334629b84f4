"""`nanotrain check` reads the modules of the recipe's model: it refuses what ranks would, nothing else.
`nanotrain plan` refuses the same."""

import attrs
import pytest
import test_fp4_masters as masters
import test_lora_layouts as lora
import test_qlora_layouts as qlora

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.recipe import write_resolved
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_engine


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


def test_a_plan_refuses_adapters_of_no_layer_though_its_dry_run_sees_one_stage(tmp_path, capsys):
    case = lora.with_lora(attrs.evolve(lora.PLAIN, pp=2, schedule="1f1b"), {"targets": ["attn", "norm"]})
    code, errors = check(case, tmp_path, capsys)
    assert code == Exit.USER
    assert "targets.1" in errors
    code = main(["plan", str(tmp_path / "recipe.toml"), "--hardware", "h100"])
    assert (code, capsys.readouterr().err) == (Exit.USER, errors)


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


@pytest.mark.parametrize("variant", ["residual", "remainder"])
@pytest.mark.parametrize("layout", masters.LAYOUTS)
def test_every_layout_that_trains_low_bit_masters_is_accepted(layout, variant, tmp_path, capsys):
    form = "bf16" if variant == "remainder" else "nvfp4"
    code, errors = check(masters.on(layout, variant, form), tmp_path, capsys)
    assert code == Exit.DONE, errors


def says_why(case):
    """Return why a rank refuses a run."""
    with pytest.raises(NanotrainError) as caught:
        make_engine(case, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"width": 64, "ffn": 128, "kv_heads": 1}, "layers.0.attn.o.weight"),
        ({"width": 64, "heads": 8, "head_size": 16, "ffn": 64}, "layers.0.ffn.down.weight"),
    ],
)
def test_a_split_of_a_block_is_refused_in_the_words_of_the_ranks(model, name, tmp_path, capsys):
    case = masters.on("tp2", "residual", "nf4")
    case = attrs.evolve(case, overrides={**case.overrides, "model": model})
    told, _ = run_ranks(says_why, 2, case)
    code, errors = check(case, tmp_path, capsys)
    assert code == Exit.USER
    assert told.startswith(f"{name}: blocks of 64 weights that share a scale in nf4 would lie on")
    assert f"precision.block_size: {told}; and 1 more" in errors


def test_experts_of_which_a_block_would_lie_on_two_ranks_are_refused(tmp_path, capsys):
    case = masters.on("ep2", "residual", "nf4")
    few = {**case.overrides["model"], "experts": 2, "top_k": 1, "expert_ffn": 4, "width": 8}
    code, errors = check(attrs.evolve(case, overrides={**case.overrides, "model": few}), tmp_path, capsys)
    assert code == Exit.USER
    assert "precision.block_size: layers.1.moe.experts." in errors
    assert "holds (1, " in errors
