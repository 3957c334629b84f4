"""What ``nanotrain plan`` advises where a recipe does not fit."""

import json
import re
import sys

import pytest
from nanotrain_plan.hardware import shipped

from nanotrain_core.cli import main


def test_what_does_not_fit_is_told_what_would(recipe, tmp_path, planned):
    _, roomy = planned(recipe, "--hardware", "cpu", "--set", "model.layers=1")
    memory = 0.95 * roomy["memory"]["peak"] / 1e9
    source = shipped()["cpu"].read_text().replace("memory_gb = 32.0", f"memory_gb = {memory}")
    small = tmp_path / "small.toml"
    small.write_text(source.replace("reserved_gb = 1.0", "reserved_gb = 0.0"))
    words = [recipe, "--hardware", str(small), "--set", "model.layers=1"]
    code, plan = planned(*words)
    assert code == 2
    assert not plan["memory"]["fits"]
    advice = {each["change"]: each["peak"] for each in plan["memory"]["advice"]}
    assert advice["batch.microbatch = 1"] < plan["memory"]["peak"]
    _, smaller = planned(*words, "--set", "batch.microbatch=1", "--no-advice")
    assert smaller["memory"]["peak"] == advice["batch.microbatch = 1"]  # computed, not guessed


@pytest.mark.full
def test_advice_that_leaves_too_little_host_memory_does_not_fit(recipe, tmp_path, planned, capsys):
    _, roomy = planned(recipe, "--hardware", "cpu", "--set", "model.layers=1")
    small = tmp_path / "small.toml"
    source = shipped()["cpu"].read_text().replace("reserved_gb = 1.0", "reserved_gb = 0.0")
    source = source.replace("memory_gb = 32.0", f"memory_gb = {0.95 * roomy['memory']['peak'] / 1e9}", 1)
    small.write_text(re.sub(r"(?m)^host_memory_gb.*?(?= *(#|$))", "host_memory_gb = 0.001", source))
    words = ["plan", recipe, "--hardware", str(small), "--set", "model.layers=1"]
    assert main([*words, "--json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    advice = plan["memory"]["advice"]
    assert min(each["peak"] for each in advice) <= plan["memory"]["usable"]
    assert not any(each["fits"] for each in advice)
    main(words)
    told = capsys.readouterr().out
    assert "What lowers the peak, but not enough" in told
    assert "too little host memory" in " ".join(told.split())


@pytest.mark.full
def test_advice_changes_the_component_that_a_recipe_has(recipe, tmp_path, planned):
    """A second table of it would be refused. What is advised is what `--set` takes, and has that peak."""
    small = tmp_path / "small.toml"
    source = shipped()["h100"].read_text().replace("reserved_gb = 3", "reserved_gb = 0")
    small.write_text(source.replace("memory_gb = 84.9", "memory_gb = 0.002"))
    words = [recipe, "--hardware", str(small)]
    words += ["--set", 'parallel=[{use="recompute",granularity="selective",every=2}]']
    _, plan = planned(*words)
    advice = {each["change"]: each["peak"] for each in plan["memory"]["advice"]}
    assert not any("[[parallel]]" in change for change in advice)
    change = 'parallel.0.granularity = "full"'
    _, changed = planned(*words, "--set", change, "--no-advice")
    assert advice[change] == changed["memory"]["peak"] < plan["memory"]["peak"]


@pytest.mark.full
def test_a_terminal_is_told_how_many_changes_were_tried(recipe, tmp_path, monkeypatch, capsys):
    small = tmp_path / "small.toml"
    source = shipped()["h100"].read_text().replace("reserved_gb = 3", "reserved_gb = 0")
    small.write_text(source.replace("memory_gb = 84.9", "memory_gb = 0.002"))
    words = ["plan", recipe, "--hardware", str(small), "--set", "model.layers=1"]
    told = []
    for shown, more in ((True, []), (True, ["--no-advice"]), (False, [])):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=shown: shown)
        assert main([*words, *more]) == 2
        told.append(re.findall(r"\rthe recipe does not fit; changes tried: (\d+)", capsys.readouterr().err))
    assert [int(number) for number in told[0]] == list(range(len(told[0])))
    assert len(told[0]) > 4
    assert told[1:] == [[], []]


@pytest.mark.full
def test_advice_that_is_not_enough_says_so_and_cuts_no_number(recipe, tmp_path, capsys):
    small = tmp_path / "small.toml"
    small.write_text(
        shipped()["h100"]
        .read_text()
        .replace("reserved_gb = 3", "reserved_gb = 0")
        .replace("memory_gb = 84.9", "memory_gb = 0.002")
    )
    assert main(["plan", recipe, "--hardware", str(small)]) == 2
    told = capsys.readouterr().out
    assert "What lowers the peak, but not enough: add ranks" in told
    advice = told.partition("add ranks")[2].partition("Assumptions")[0]
    assert "…" not in advice
    assert " and " in advice  # several changes together, wrapped
