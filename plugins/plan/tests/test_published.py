"""Published runs, planned from recipes in ``published/``: docs/planning.md prints predictions and errors."""

import json
from pathlib import Path

import attrs
import pytest
from nanotrain_plan.hardware import find_hardware

from nanotrain_core.cli import main

FOLDER = Path(__file__).parent / "published"
DOCS = Path(__file__).parents[3] / "docs" / "planning.md"

#: Recipe, hardware, key of ``time`` in JSON, what was published, how the docs print it, other packages.
RUNS = [
    ("deepseek_v3_h800", "h800_deepseek.toml", "tokens_per_second_per_device", 1542, "{:,.0f} tokens/s",
     ("deepseek", "ep_deepseek", "zero12", "fp8_deepseek_v3", "pp_1f1b")),
    ("llama_3_1_8b_h100", "h100", "tokens_per_second_per_device", 81222 / 8, "{:,.0f} tokens/s", ("zero12",)),
    ("llama_3_1_8b_h100_fp8", "h100", "tokens_per_second_per_device", 108436 / 8, "{:,.0f} tokens/s",
     ("zero12", "fp8_deepseek_v3")),
    ("megatron_22b_a100", "a100", "step", 1.10, "{:.2f} s a step", ("tp",)),
    ("megatron_175b_a100", "a100", "step", 13.75, "{:.2f} s a step", ("tp", "pp_1f1b")),
    ("megatron_530b_a100", "a100", "step", 37.83, "{:.2f} s a step", ("tp", "pp_1f1b")),
    ("megatron_1t_a100", "a100", "step", 71.49, "{:.2f} s a step", ("tp", "pp_1f1b")),
    ("llama_3_405b_h100", "h100", "mfu", 0.41, "{:.1%} MFU", ("tp", "pp_1f1b", "zero12")),
    ("llama_3_405b_128k_h100", "h100", "mfu", 0.38, "{:.1%} MFU", ("tp", "cp", "pp_1f1b", "zero12")),
    ("llama_7b_h200", "h200", "mfu", 0.578, "{:.1%} MFU", ()),
    ("bridge_llama_3_70b_h100_fp8", "h100", "tokens_per_second_per_device", 1602, "{:,.0f} tokens/s",
     ("tp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_405b_h100_fp8", "h100", "tokens_per_second_per_device", 292, "{:,.0f} tokens/s",
     ("tp", "cp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_8b_b200_mxfp8", "b200", "tokens_per_second_per_device", 29521, "{:,.0f} tokens/s",
     ("zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_8b_gb200_mxfp8", "gb200", "tokens_per_second_per_device", 29789, "{:,.0f} tokens/s",
     ("zero12", "fp8_deepseek_v3")),
    ("bridge_deepseek_v3_gb200", "gb200", "tokens_per_second_per_device", 3139, "{:,.0f} tokens/s",
     ("deepseek", "ep_deepseek", "pp_1f1b", "zero12")),
    ("bridge_qwen3_235b_gb200", "gb200", "tokens_per_second_per_device", 4916, "{:,.0f} tokens/s",
     ("moe_transformer", "ep_deepseek", "pp_1f1b", "zero12")),
    ("bridge_llama_3_8b_gb300_mxfp8", "gb300", "tokens_per_second_per_device", 36108, "{:,.0f} tokens/s",
     ("zero12", "fp8_deepseek_v3")),
    ("bridge_deepseek_v3_gb300", "gb300", "tokens_per_second_per_device", 3848, "{:,.0f} tokens/s",
     ("deepseek", "ep_deepseek", "pp_1f1b", "zero12")),
    ("bridge_llama_3_70b_gb300_mxfp8", "gb300", "tokens_per_second_per_device", 4864, "{:,.0f} tokens/s",
     ("pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_405b_gb300_mxfp8", "gb300", "tokens_per_second_per_device", 952, "{:,.0f} tokens/s",
     ("tp", "cp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_qwen3_235b_gb300_mxfp8", "gb300_ep_overlap.toml", "tokens_per_second_per_device", 9015,
     "{:,.0f} tokens/s", ("moe_transformer", "ep_deepseek", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_qwen3_30b_gb300_mxfp8", "gb300_ep_overlap.toml", "tokens_per_second_per_device", 45275,
     "{:,.0f} tokens/s", ("moe_transformer", "ep_deepseek", "zero12", "fp8_deepseek_v3")),
    ("bridge_qwen3_30b_b300_mxfp8", "b300_ep_overlap.toml", "tokens_per_second_per_device", 40769,
     "{:,.0f} tokens/s", ("moe_transformer", "ep_deepseek", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_70b_gb300_nvfp4", "gb300", "tokens_per_second_per_device", 7296, "{:,.0f} tokens/s",
     ("pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_70b_gb200_nvfp4", "gb200", "tokens_per_second_per_device", 4864, "{:,.0f} tokens/s",
     ("tp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_405b_gb300_nvfp4", "gb300", "tokens_per_second_per_device", 1413, "{:,.0f} tokens/s",
     ("tp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
    ("bridge_llama_3_405b_gb200_nvfp4", "gb200", "tokens_per_second_per_device", 1166, "{:,.0f} tokens/s",
     ("tp", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
]  # fmt: skip
#: Whose error is larger: docs/planning.md says what its recipe lacks.
LARGER = [
    ("llama_3_1_8b_torchtitan", "h100_hbm2e", "tokens_per_second_per_device", 6667, "{:,.0f} tokens/s",
     ("zero12", "fsdp")),
    ("bridge_qwen3_30b_gb200_mxfp8", "gb200", "tokens_per_second_per_device", 23766, "{:,.0f} tokens/s",
     ("moe_transformer", "ep_deepseek", "zero12", "fp8_deepseek_v3")),
    ("bridge_deepseek_v3_gb300_mxfp8", "gb300_ep_overlap.toml", "tokens_per_second_per_device", 6338,
     "{:,.0f} tokens/s", ("deepseek", "ep_deepseek", "pp_1f1b", "zero12", "fp8_deepseek_v3")),
]  # fmt: skip
#: Hardware of single rows, and the shipped file of which it has all but the overlap of experts' all-to-alls.
ROWS_OWN = {"h800_deepseek": "h800", "gb300_ep_overlap": "gb300", "b300_ep_overlap": "b300"}


def predicted(name, hardware, key, needed, capsys):
    for package in needed:
        pytest.importorskip(f"nanotrain_{package}")
    file = str(FOLDER / hardware) if hardware.endswith(".toml") else hardware
    command = ["plan", str(FOLDER / f"{name}.toml"), "--hardware", file, "--no-advice", "--json"]
    assert main(command) in (0, 2)  # 2: does not fit
    return json.loads(capsys.readouterr().out)["time"][key]


def assert_documented(name, found, published, form):
    """Expect a row: what it is, the recipe's file, what was published, what is predicted, the error."""
    row = next(
        line for line in DOCS.read_text().splitlines() if line.startswith("|") and f"{name}.toml" in line
    )
    *_, told, forecast, error = (cell.strip() for cell in row.strip("|").split("|"))
    assert (told, forecast) == (form.format(published), form.format(found))
    assert error.strip("*") == f"{found / published - 1:+.0%}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "hardware", "key", "published", "form", "needed"), RUNS, ids=[r[0] for r in RUNS]
)
def test_published_runs_are_predicted_within_a_fifth(name, hardware, key, published, form, needed, capsys):
    found = predicted(name, hardware, key, needed, capsys)
    assert found == pytest.approx(published, rel=0.2)
    assert_documented(name, found, published, form)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "hardware", "key", "published", "form", "needed"), LARGER, ids=[r[0] for r in LARGER]
)
def test_a_larger_error_is_documented(name, hardware, key, published, form, needed, capsys):
    assert_documented(name, predicted(name, hardware, key, needed, capsys), published, form)


def test_every_recipe_here_is_planned():
    planned = {name for name, *_ in (*RUNS, *LARGER)}
    assert planned == {path.stem for path in FOLDER.glob("*.toml")} - set(ROWS_OWN)


@pytest.mark.parametrize("own", ROWS_OWN)
def test_hardware_of_a_row_differs_by_the_overlap_of_all_to_alls_alone(own):
    found, shipped = find_hardware(str(FOLDER / f"{own}.toml")), find_hardware(ROWS_OWN[own])
    overlap = attrs.evolve(shipped.overlap, ep=1.0)
    assert found == attrs.evolve(shipped, name=found.name, overlap=overlap)
