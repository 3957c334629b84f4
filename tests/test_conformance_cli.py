"""``nanotrain conformance`` runs the checks of a component and says which failed and why."""

import argparse
from pathlib import Path

import pytest
from command import nanotrain

from nanotrain_core.cli import conformance
from nanotrain_core.errors import Exit, NanotrainError

TWINS = str(Path(__file__).with_name("broken_twins.py"))


def call(*words):
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    return conformance.run(parser.parse_args(words))


def test_a_component_that_passes_exits_with_0(capsys):
    assert call("topology:grid", "--set", "tp=2", "--nproc", "2") == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all checks passed"
    assert any(line.startswith("ok     grid-w2-groups_are_real: All ranks derive") for line in lines)


def test_checks_that_need_several_ranks_are_named(capsys):
    assert call("topology:grid") == Exit.DONE
    assert capsys.readouterr().out.endswith("(--degree DIM=N): groups_are_real\n")


def test_a_broken_component_is_told_with_its_numbers(capsys):
    assert call("schedule:drops_backward", "--plugin", TWINS) == Exit.FAILED
    output = capsys.readouterr().out
    assert "FAILED drops_backward-w1-every_pass_happens_once: A stage has exactly one F" in output
    assert "rank 0, 3 microbatches: missing ['B0.2']" in output


def test_tables_are_written_as_with_set_of_a_recipe():
    """A bare word was refused here, and a string there."""
    lines = ["model.vocab=64", "model.use=routed", 'parallel=[{use="summed"}]']
    expected = {"model": {"vocab": 64, "use": "routed"}, "parallel": [{"use": "summed"}]}
    assert conformance._tables("--with", lines) == expected


def test_the_failures_the_harness_makes_on_purpose_are_not_shown(tmp_path):
    done = nanotrain("conformance", "monitor:jsonl", cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    assert all(line.startswith("ok     jsonl-w1-") for line in done.out.splitlines()[:-1])


def test_one_reason_for_several_failures_is_told_once():
    error = RuntimeError("no licence")
    told = set()
    assert conformance._reason(error, told) == ["no licence"]
    assert conformance._reason(error, told) == ["for the same reason"]
    assert conformance._reason(None, told) == []


def test_a_recipe_that_is_refused_is_told_once_with_the_option_that_mends_it(capsys):
    assert call("schedule:accumulate", "--with", "batch.sequences=0") == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("FAILED accumulate-w1-makes_a_recipe: ")
    assert "batch.sequences" in lines[2]
    assert "--with KEY=VALUE" in lines[3]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["paralel:ddp"], r"expected KIND:NAME .* \(did you mean 'parallel'\?\)"),
        (["parallel"], r"got 'parallel'; kinds: topology"),
        (["topology:gird"], r"no topology named 'gird' \(did you mean 'grid'\?\)"),
        (["topology:grid", "--set", "tq=2"], r"unknown key 'tq' \(did you mean 'tp'\?\)"),
        (["topology:grid", "--set", "tp"], "--set: expected KEY=VALUE"),
        (["topology:grid", "--degree", "tp"], "--degree: expected DIM=N"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(words, text):
    with pytest.raises(NanotrainError, match=text):
        call(*words)
