"""``nanotrain conformance`` runs the checks of a component and says which failed and why."""

import argparse
from pathlib import Path

import pytest
from command import nanotrain

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.cli import conformance
from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.testing import Case

TWINS, FLAT = (str(Path(__file__).with_name(f"{name}.py")) for name in ("broken_twins", "flat_topology"))


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
        (["topology:grid", "--degree", "tp=two"], r"--degree: expected DIM=N .* above 0, got tp=two"),
        (["topology:grid", "--degree", "tp=0"], r"--degree: expected DIM=N .* above 0, got tp=0"),
        (
            ["topology:grid", "--degree", "tq=2"],
            r"^degree tq = 2: topology 'grid' has no tq \(did you mean 'tp'\?\); it has pp, dp, cp, tp, ",
        ),
        (
            ["topology:grid", "--degree", "dp=2", "--nproc", "4"],
            "^degree dp = 2: topology 'grid' lays 4 ranks out with dp = 4\n2 ranks would have all of these",
        ),
        (
            ["topology:grid", "--degree", "pp=2", "--degree", "dp=2", "--degree", "ep=4"],
            "^degree dp = 2: .*\nno number of ranks would have all of these degrees$",
        ),
        (
            ["topology:grid", "--degree", "pp=3", "--nproc", "4"],
            "^topology 'grid', number of ranks 4: pp 3 x cp 1 x tp 1 = 3 does not divide 4; 3 or 6 ranks",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(words, text):
    with pytest.raises(NanotrainError, match=text):
        call(*words)


@pytest.mark.parametrize(("kind", "use"), [("parallel", "sliced"), ("topology", "flat")])
def test_degrees_reach_whatever_topology_there_is(kind, use):
    """Those of another topology than grid were left out without a word."""
    around = {"topology": {"use": "flat"}, "parallel": [{"use": "sliced"}, {"use": "summed"}]}
    case = Case(kind, use=use, topology={"dp": 3, "tp": 2, "way": 5}, overrides=around, plugins=[FLAT])
    config = case.recipe(batch={"sequences": 12}).topology.config
    assert (case.world_size, config.tp, config.way) == (6, 2, 5)
    assert case.alone().recipe().topology.use == "grid"


def test_a_degree_that_another_topology_lacks_is_refused():
    words = ["parallel:summed", "--with", "topology.use=flat", "--plugin", FLAT, "--degree", "ep=2"]
    with pytest.raises(NanotrainError, match=r"^degree ep = 2: topology 'flat' has no ep.*; it has dp, tp$"):
        call(*words)


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({"ep": 2, "etp": 2}, 4),
        ({"tp": 2, "ep": 2}, 2),
        ({"dp": 2, "tp": 2, "ep": 2}, 4),
        ({"pp": 2, "ep": 3, "tp": 2}, 12),
        ({"edp": 2, "ep": 2}, 4),
    ],
)
def test_there_are_as_many_ranks_as_both_views_need(degrees, ranks):
    """Those of experts did not count: ep and etp of 2 made one rank, which does not hold them."""
    case = Case("parallel", use="summed", topology=degrees)
    keys = {dim: degree for dim, degree in degrees.items() if not dim.endswith("dp")}
    layout = Grid(GridConfig(**keys)).layout(ranks)
    assert {dim: layout.size(dim) for dim in degrees} == degrees
    assert case.world_size == ranks
