"""A trace of ranks does what ``nanotrain explain`` says, or tells where it does not."""

import re
import shlex

import pytest
from explained import PHASES, TINY, explained, value
from nanotrain_plan.dry.real import real_recipe, record_step
from nanotrain_plan.explain import trace

from nanotrain_core.api import HostMemory
from nanotrain_core.cli import main
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.testing import run_ranks


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def test_a_trace_is_as_predicted(recipe, capsys):
    code, told, whole = explained(capsys, recipe, "--trace", "--set", "model.layers=1")
    assert code == 0
    assert whole["trace"]["same"]
    assert all(each["sources"] for each in told["What really happened"]["statements"])
    real = whole["trace"]["ranks"][0]["real"]
    rows = told["Communication"]["tables"][0]["rows"]
    assert sum(row[4] for row in rows) == len(real)
    assert sum(row[5] for row in rows) == sum(each["bytes"] for each in real)
    assert {tuple(row[3]) for row in rows} == {tuple(each["ranks"]) for each in real}


def _told_by_ranks(recipe):
    found, told = resolve_recipe(recipe), []
    record_step(real_recipe(found.recipe, found.registry), found.registry, told.append)
    return told


@pytest.mark.full
def test_a_trace_tells_what_it_does_meanwhile(recipe, capsys):
    """Its ranks are forked from a server, which has another stderr than a test."""
    assert main(["explain", recipe, "--trace", "--set", "model.layers=1"]) == 0
    err = capsys.readouterr().err
    assert re.findall(r"nanotrain: +\d+ s: (.*)", err) == [
        "explaining the recipe from a dry step",
        "predicting a step of 2 ranks",
        "starting 2 processes, which import torch and meet",
        "comparing the collectives of all ranks",
    ]
    assert run_ranks(_told_by_ranks, 2, recipe) == [["step 1 of 2", "step 2 of 2"]] * 2


def smaller(capsys, *words):
    """Return the overrides that are suggested in place of a recipe that is too large for a trace."""
    assert main(["explain", *words, "--trace"]) == 2
    advice = capsys.readouterr().err.splitlines()[-1]
    changes = [change.split("=", 1) for change in shlex.split(advice.partition(" --trace ")[2])[1::2]]
    assert len(dict(changes)) == len(changes), "an option twice"
    return dict(changes)


def refused(capsys):
    """Return what a trace was refused for, and the words of the command that is suggested in its place."""
    problem, advice = (line for line in capsys.readouterr().err.splitlines() if "--trace" in line)
    return problem, shlex.split(advice.partition("nanotrain explain ")[2])


def test_of_too_many_ranks_the_fewest_with_all_axes_are_suggested(recipe, capsys):
    many = ["--set", "run.ranks=64", "--set", "batch.sequences=64"]
    assert smaller(capsys, recipe, *many) == {"batch.sequences": "8", "run.ranks": "2"}
    sharded = ["--set", "topology.tp=4", "--set", 'parallel=[{use="tp"}, {use="ddp"}]']
    found = smaller(capsys, recipe, *many, *sharded)
    assert (found["run.ranks"], found["topology.tp"]) == ("4", "2")


def test_what_is_suggested_takes_seconds(recipe, capsys):
    """Fewer kinds of tokens, shorter sequences; steps only where phases alone said how many."""
    large = ["--set", "model.vocab=50000", "--set", "data.vocab=50000", "--set", "batch.length=4096"]
    found = smaller(capsys, recipe, *large, "--set", "run.ranks=64", "--set", "batch.sequences=64")
    assert {key: found[key] for key in ("model.vocab", "data.vocab", "batch.length")} == {
        "model.vocab": "1024",
        "data.vocab": "1024",
        "batch.length": "64",
    }
    assert "run.steps" not in found


def test_a_trace_that_differs_says_where_and_ends_with_2(recipe, capsys, monkeypatch):
    predict = trace.predict

    def one_less(*args):
        found = predict(*args)
        del found[1].collectives[0]
        return found

    monkeypatch.setattr(trace, "predict", one_less)
    code, told, whole = explained(capsys, recipe, "--trace", "--set", "model.layers=1")
    assert code == 2
    assert not whole["trace"]["same"]
    assert [each["first_difference"] for each in whole["trace"]["ranks"]] == [None, 0]
    texts = [each["text"] for each in told["What really happened"]["statements"]]
    assert any(text.startswith("Rank 1: number 1 differs") for text in texts)


@pytest.mark.full
def test_what_is_too_large_to_trace_is_told_a_smaller_recipe(recipe, capsys, monkeypatch):
    assert main(["explain", recipe, "--trace", "--nproc", "64", "--set", "batch.sequences=64"]) == 2
    err = capsys.readouterr().err
    assert "64 ranks are too many for one machine; at most 16" in err
    monkeypatch.setattr("nanotrain_plan.explain.shrink.host_memory", lambda: HostMemory(1_000_000))
    assert main(["explain", recipe, "--trace"]) == 2
    problem, words = refused(capsys)
    assert "training takes some" in problem
    code, _, whole = explained(capsys, *words)
    assert code == 0
    assert whole["trace"]["same"]


@pytest.mark.parametrize("bytes_of_memory", [pytest.param(None, marks=pytest.mark.full), 1_000_000])
def test_a_trace_without_the_recipes_data_is_told_one_on_synthetic_data(
    bytes_of_memory, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "text.toml"
    data = '[data]\nuse = "text"\npaths = ["corpus"]\n'
    path.write_text(TINY.partition("[data]")[0].replace("vocab = 64", "vocab = 256") + data)
    if bytes_of_memory:
        monkeypatch.setattr("nanotrain_plan.explain.shrink.host_memory", lambda: HostMemory(bytes_of_memory))
    assert main(["explain", str(path), "--trace"]) == 2
    problem, words = refused(capsys)
    wanted = "training takes some" if bytes_of_memory else f"data path {tmp_path / 'corpus'} does not exist"
    assert wanted in problem
    code, _, whole = explained(capsys, *words)
    assert code == 0
    assert whole["trace"]["same"]


@pytest.mark.full  # the test above has phases, too
def test_a_smaller_recipe_has_no_phases_that_set_another_batch(tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(TINY.replace("steps = 10\n", "").replace("width = 32", "width = 512") + PHASES)
    assert main(["explain", str(path), "--trace"]) == 2
    problem, words = refused(capsys)
    assert "two steps of 60,000 sequences take some" in problem
    code, told, whole = explained(capsys, *words)
    assert code == 0
    assert whole["trace"]["same"]
    assert value(told["The batch"], "sequences") == 8
    assert "run.steps=2" in words  # the file has none
