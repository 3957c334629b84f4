"""``nanotrain check --hardware``: whether a recipe fits, before it is planned in full."""

import argparse

import pytest
from nanotrain_plan.hardware import shipped

from nanotrain_core.cli import main
from nanotrain_core.cli.memory import memory_line
from nanotrain_core.registry.registry import load_plugins


@pytest.mark.full
def test_check_asks_for_memory_and_passes_what_does_not_fit(recipe, tmp_path, capsys):
    small = tmp_path / "small.toml"
    small.write_text(shipped()["cpu"].read_text().replace("memory_gb = 32.0", "memory_gb = 1.001"))
    assert main(["check", recipe, "--set", "model.layers=1", "--hardware", str(small)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "warning: it will not fit" in told
    assert f"usable on {small}" in told
    args = argparse.Namespace(
        recipe=recipe, hardware="cpu", set=[], plugin=[], no_plugin=[], nproc=None, nnodes=None
    )
    assert "not planned within 0 s" in memory_line(args, load_plugins(), limit=0)
    assert "pip install -e plugins/plan)" in memory_line(args, load_plugins(block=["nanotrain-plan"]))


@pytest.mark.full
def test_check_tells_memory_where_the_data_is_missing(recipe, capsys):
    words = ["--set", "model.layers=1", "--set", 'data={use="text",paths=["no/such/corpus"]}']
    assert main(["check", recipe, *words, "--hardware", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert ": ok" not in out
    assert "usable on cpu" in out.splitlines()[-1]
    assert "data.paths.0: " in err
    assert "no/such/corpus" in err


def test_check_refuses_hardware_that_nobody_knows(recipe, capsys):
    assert main(["check", recipe, "--set", "model.layers=1", "--hardware", "h10"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("nanotrain: --hardware: no hardware is named 'h10' (did you mean 'h100'?)")
