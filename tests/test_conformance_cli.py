"""``nanotrain conformance`` runs the checks of a component and says which failed and why."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.cli import conformance
from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.testing import Case
from nanotrain_core.testing.campaign import Result, Verdict
from nanotrain_core.testing.trial_process import described
from nanotrain_core.testing.variants import Skip, variants_of

TWINS, FLAT, FOUR = (
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("broken_twins", "flat_topology", "broken_layouts")
)


def call(*words):
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    return conformance.run(parser.parse_args(words))


@pytest.mark.full
def test_a_component_that_passes_exits_with_0(capsys):
    assert call("topology:grid", "--set", "tp=2", "--nproc", "2", "--quick") == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"all {len(lines) - 1} checks passed"
    assert any(line.startswith("ok      grid-w2-groups_are_real: All ranks derive") for line in lines)


def test_without_options_it_is_listed_on_every_layout_that_it_admits(capsys):
    assert call("parallel:summed", "--list", "--json") == Exit.DONE
    listed = json.loads(capsys.readouterr().out)
    ids = {check["id"] for check in listed["checks"]}
    for layout in ("dp2", "dp4", "tp2", "dp2-tp2", "pp2-tied", "dp2-ep2", "dp2-uneven", "dp2-biased"):
        assert f"summed-{layout}-gradients_equal[fp64]" in ids
    assert all(check["since"] and check["invariant"] for check in listed["checks"])
    assert listed["skipped"] == []


def test_what_a_component_declares_not_to_do_is_skipped_by_name(tmp_path, capsys):
    plugin = tmp_path / "alone.py"
    plugin.write_text(
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.component import Component, Support\n"
        "from nanotrain_core.testing.components.registered import NoKeys\n"
        "@hookimpl\n"
        "def nanotrain_register_schedule(register):\n"
        "    register(Component(name='alone', config=NoKeys, mesh_dims={'pp'}, summary='s',\n"
        "        factory='nanotrain_core.testing.components.registered:staged', supports={\n"
        "            'pp': Support.UNSUPPORTED, 'uneven_layers': Support.PARTIAL}))\n"
    )
    call("schedule:alone", "--plugin", str(plugin), "--list")
    shown = capsys.readouterr().out
    assert "skipped alone-pp2: it declares pp: unsupported" in shown
    assert "skipped alone-any_number_of_layers_is_cut: it declares uneven_layers: partial" in shown
    assert "any_number_of_layers_is_cut: From one layer" not in shown


def test_a_check_that_hangs_is_named_and_the_others_go_on(tmp_path, capsys):
    plugin = tmp_path / "hangs.py"
    plugin.write_text(
        "import time\n"
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.builtin.configs import AccumulateConfig\n"
        "from nanotrain_core.component import Component\n"
        "from nanotrain_core.pipeline.accumulate import Accumulate\n"
        "class Hangs(Accumulate):\n"
        "    def actions(self, pp, microbatches):\n"
        "        while microbatches == 33:\n"
        "            time.sleep(1)\n"
        "        return super().actions(pp, microbatches)\n"
        "@hookimpl\n"
        "def nanotrain_register_schedule(register):\n"
        "    register(Component(name='hangs', config=AccumulateConfig, factory=f'{__name__}:Hangs'))\n"
    )
    words = ("--plugin", str(plugin), "--quick", "--timeout", "8", "--jobs", "2")
    assert call("schedule:hangs", *words, "-k", "e*s-w1-[ep]*") == Exit.USER  # selects nothing
    capsys.readouterr()
    assert call("schedule:hangs", *words, "-k", "hangs-w1-[ep]*", "--json") == Exit.FAILED
    found = {result["label"]: result for result in json.loads(capsys.readouterr().out)["results"]}
    assert found["every_pass_happens_once"]["verdict"] == "hung"
    assert found["every_pass_happens_once"]["reason"] == "did not end within 8 s (--timeout)"
    assert found["parts_cover_the_layers"]["verdict"] == "passed"


@pytest.mark.full
def test_checks_run_in_one_thread_as_ranks_do(tmp_path):
    plugin = tmp_path / "threads.py"
    plugin.write_text(
        "import torch\n"
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.builtin.configs import AccumulateConfig\n"
        "from nanotrain_core.component import Component\n"
        "from nanotrain_core.pipeline.accumulate import Accumulate\n"
        "class Counts(Accumulate):\n"
        "    def actions(self, pp, microbatches):\n"
        "        raise RuntimeError(f'{torch.get_num_threads()} threads')\n"
        "@hookimpl\n"
        "def nanotrain_register_schedule(register):\n"
        "    register(Component(name='counts', config=AccumulateConfig, factory=f'{__name__}:Counts'))\n"
    )
    words = ("conformance", "schedule:counts", "--plugin", str(plugin), "--quick")
    command = [sys.executable, "-m", "nanotrain_core.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    told = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert "1 threads" in told.stdout + told.stderr


def test_a_printed_line_selects_its_check(capsys):
    assert call("schedule:accumulate", "--quick", "--list") == Exit.DONE
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "every_pass_happens_once" in each)
    for text in (
        f"FAILED {line}",
        f"tests/x.py::test_conformance[{line.partition(':')[0]}] - AssertionError",
    ):
        call("schedule:accumulate", "--quick", "--list", "-k", text)
        assert capsys.readouterr().out.splitlines() == [line, "1 checks"]


def test_a_plugin_that_ends_the_process_when_it_is_imported_is_named(tmp_path):
    plugin = tmp_path / "ends.py"
    plugin.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(NanotrainError, match=r"it calls sys\.exit\(3\) when it is imported"):
        call("schedule:ends", "--plugin", str(plugin))


def test_an_expected_failure_is_none_and_one_that_passes_is_one(capsys):
    words = ("schedule:drops_backward", "--plugin", TWINS, "--quick", "-k", "every_")
    assert call(*words, "--expect-failure", "every_pass_happens_once") == Exit.DONE
    assert "xfail   drops_backward-w1-every_pass_happens_once" in capsys.readouterr().out
    assert call(*words, "--expect-failure", "every_rank_gets_the_same", "-x") == Exit.FAILED
    with pytest.raises(NanotrainError, match=r"no check is named 'every_pass' \(did you mean"):
        call(*words, "--expect-failure", "every_pass")


@pytest.mark.full
def test_a_failure_that_shows_in_one_layout_alone_can_be_expected(capsys):
    """Biases that four ranks add: two ranks have no fault."""
    words = ("parallel:adds_biases_of_four", "--plugin", FOUR, "-k", "inner_shared")
    assert call(*words, "--expect-failure", "inner_shared_and_biased_layers") == Exit.DONE
    printed = capsys.readouterr().out
    assert "xfail   adds_biases_of_four-tp4-" in printed
    assert "ok      adds_biases_of_four-tp2-" in printed


def test_a_service_is_started_before_the_checks_and_ended_behind_them(tmp_path, capfd):
    up, down = (f"touch {tmp_path / name}" for name in ("up", "down"))
    assert call("topology:grid", "--quick", "--list", "--setup", up, "--teardown", down) == Exit.DONE
    assert {path.name for path in tmp_path.iterdir()} == {"up", "down"}
    with pytest.raises(NanotrainError, match=r"^--setup: 'exit 4' ended with code 4$"):
        call("topology:grid", "--setup", "exit 4")


def test_a_broken_component_is_told_with_its_numbers(capsys):
    words = ("--plugin", TWINS, "--quick", "-k", "*every_pass*")
    assert call("schedule:drops_backward", *words) == Exit.FAILED
    output = capsys.readouterr().out
    assert "FAILED  drops_backward-w1-every_pass_happens_once: A stage has exactly one F" in output
    assert "rank 0, 3 microbatches: missing ['B0.2']" in output


def test_an_error_in_a_component_is_told_with_the_line_that_made_it(tmp_path):
    """numpy's line raised it; what must be changed is the component's."""
    plugin = tmp_path / "stacks.py"
    plugin.write_text("import numpy as np\n\n\ndef read():\n    return np.stack([])\n")
    stacks = runpy.run_path(str(plugin))
    with pytest.raises(ValueError, match="to stack") as caught:
        stacks["read"]()
    assert described(caught.value) == f"ValueError: need at least one array to stack ({plugin}:5, in read)"


def test_what_a_check_or_the_core_says_is_told_as_it_is():
    with pytest.raises(NanotrainError) as caught:
        call("topology:grid", "--setup", "exit 4")
    assert described(caught.value) == str(caught.value)


def test_tables_are_written_as_with_set_of_a_recipe():
    """A bare word was refused here, and a string there."""
    lines = ["model.vocab=64", "model.use=routed", 'parallel=[{use="summed"}]']
    expected = {"model": {"vocab": 64, "use": "routed"}, "parallel": [{"use": "summed"}]}
    assert conformance._tables("--with", lines) == expected


def test_a_changed_use_replaces_the_table_as_with_set_of_a_recipe():
    """Keys of the other component had remained, and were refused as unknown."""
    lines = [
        "model.use=routed",
        "model.experts=4",
        "model.vocab=64",
        "model.use=transformer",
        "model.layers=1",
    ]
    expected = {"model": {"use": "transformer", "layers": 1}}
    assert conformance._tables("--with", lines) == expected


@pytest.mark.full
def test_the_failures_the_harness_makes_on_purpose_are_not_shown(tmp_path):
    words = ("conformance", "monitor:jsonl", "--quick", "-k", "its_failure")
    # In a process that is new: it forks workers of its own.
    command = [sys.executable, "-m", "nanotrain_core.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    assert all(line.startswith("ok      jsonl-w1-") for line in done.stdout.splitlines()[:-1])


def test_one_reason_for_several_failures_is_told_once():
    failed = Result("id", "label", Verdict.FAILED, "", "no license")
    told = set()
    assert conformance._reason(failed, told) == ["no license"]
    assert conformance._reason(failed, told) == ["for the same reason"]
    assert conformance._reason(Result("id", "label", Verdict.PASSED, ""), told) == []


def test_a_recipe_that_is_refused_is_told_once_with_the_option_that_mends_it(capsys):
    assert call("schedule:accumulate", "--with", "batch.sequences=0", "--quick") == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("FAILED  accumulate-w1-makes_a_recipe: ")
    assert "batch.sequences" in lines[2]
    assert "--with KEY=VALUE" in lines[3]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["paralel:ddp"], r"expected KIND:NAME .* \(did you mean 'parallel'\?\)"),
        (["parallel"], r"got 'parallel'; kinds: topology"),
        (
            ["command:keys"],
            r"conformance has no checks of commands; a test calls .*main\(\[\"keys\", \.\.\.\]\)",
        ),
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


OWN_DIMENSION = """
import attrs
from nanotrain_core.api import Component, hookimpl

@attrs.define(frozen=True, kw_only=True)
class Config:
    pass

@hookimpl
def nanotrain_register_parallel(register):
    factory = f"{__name__}:build"
    register(Component(name="own", config=Config, factory=factory, summary="s", mesh_dims={"copies"}))

def build(config):
    from nanotrain_core.api.torch import Parallel
    return Parallel()
"""


def test_a_wrapper_is_tested_along_a_dimension_of_its_own_where_the_topology_has_it(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_DIMENSION)
    flat = Path(__file__).with_name("flat_topology.py")
    case = Case("parallel", use="own", plugins=[path, flat])
    told = {each.name: each.reason for each in variants_of(case) if isinstance(each, Skip)}
    reason = "copies: topology 'grid' has none; expected one that has, with --with topology.use=NAME"
    assert told["copies2"] == reason
    found = {s.name: s for s in variants_of(attrs.evolve(case, overrides={"topology": {"use": "hybrid"}}))}
    (copies,) = [each for name, each in found.items() if name == "copies2"]
    assert (copies.case.world_size, dict(copies.case.topology)) == (2, {"copies": 2})
    assert copies.has("parallel", "gradients_equal", "gradients_equal[fp64]")
    assert copies.has("parallel", "its_dimensions_are_used", "its_dimensions_are_used")
