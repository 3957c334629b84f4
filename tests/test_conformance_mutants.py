"""The harness catches what it is there to catch: each broken twin fails the checks meant for its fault."""

import attrs
import pytest
from faults import ALSO, CHECKPOINTS, FAULTS, MORE_LAYERS, RANGED, SUMMED, TWINS

from nanotrain_core.testing import Case, conformance, failures, trials
from nanotrain_core.testing.conformance import planned
from nanotrain_core.testing.pool import COLLECTIVE_CHECKS


@pytest.fixture(autouse=True)
def collectives_compared(monkeypatch):
    """Have a mismatch fail at once, by name."""
    monkeypatch.setenv(COLLECTIVE_CHECKS, "on")


# One kills a rank at every write of a save, others fail checks of many steps: up to 15 s each.
@pytest.mark.full_cases(
    "forgets_by_itself",
    "forgets_its_count",
    "keeps_the_other_branch",
    "scales_by_every_pass",
    "counts_ignored_targets",
    "forgets_its_masters",
    "mixes_heads",
    "forgets_inner",
    "ignores_other_ranks",
    "asks_the_module_for_its_size",
    "drops_them_after_steps",
    "writes_in_place",
    "never_falls_back",
    "waits_to_publish",
    "sums_all_but_the_last",
    "sums_in_its_step",
    *("adds_eps_to_the_root", "as_long_as_its_piece", "counts_on_one_rank", "draws_before_saving"),
    *("draws_numbers", "drops_one_sum", "forgets_their_weights", "publishes_anything", "tells_anyhow"),
    "wrong_gradient_of_gates",
    "computes_in_float32",
    "measures_on_one_rank",
    "changes_gradients",
    "drops_the_last_row",
)
@pytest.mark.parametrize(("case", "faults"), FAULTS, ids=[case.use for case, _ in FAULTS])
def test_a_fault_fails_each_check_meant_for_it(case, faults):
    found = failures(t for t in trials(case) if t.check.kind == case.kind and t.label in faults)
    assert set(found) == faults


@pytest.mark.full
@pytest.mark.parametrize(("case", "faults"), FAULTS, ids=[case.use for case, _ in FAULTS])
def test_a_fault_fails_exactly_the_checks_meant_for_it(case, faults):
    found = failures(t for t in trials(case) if t.check.kind == case.kind)
    report = "\n".join(f"{label}: {error}" for label, error in found.items())
    assert set(found) == faults | ALSO.get(case.use, set()), report


def layout_failures(case):
    return failures(t for t in trials(case) if t.label == "layout_changes_nothing")


@pytest.mark.full
def test_without_options_optimizers_are_also_tried_on_ranges_of_parameters():
    """Of whole ones, which plain data parallelism hands out, a norm is what one process has."""
    listed, _ = planned(Case("optimizer", use="as_long_as_its_piece", plugins=TWINS))
    case = next(trial.case for trial in listed if trial.id.startswith("as_long_as_its_piece-dp2-ranges-"))
    assert "WholeTensors gathers whole ones" in str(layout_failures(case)["layout_changes_nothing"])
    assert not layout_failures(attrs.evolve(case, overrides=SUMMED))


def test_without_options_checkpoints_are_also_tried_with_tensors_of_several_dtypes():
    listed, _ = planned(Case("checkpoint", use="saves_in_one_dtype", plugins=CHECKPOINTS))
    of_case = {t.case.id: t for t in listed if t.label == "every_bit_comes_back"}
    assert not failures([of_case["saves_in_one_dtype-uneven"]])
    assert failures([of_case["saves_in_one_dtype-bf16"]])


@pytest.mark.full
def test_without_options_what_monitors_publish_is_also_that_of_one_process_where_weights_are_split():
    listed, _ = planned(Case("monitor", use="measures_its_share", plugins=TWINS))
    of_case = {t.case.id: t for t in listed if t.label == "publishes_what_one_process_does"}
    (error,) = failures([of_case["measures_its_share-tp2"]]).values()
    assert "'share' is" in str(error)
    assert not failures([of_case["measures_its_share-dp2"]])


@pytest.mark.full
def test_gradients_that_other_weights_have_are_not_blamed_on_what_monitors_see():
    case = Case("optimizer", use="as_long_as_its_piece", topology={"dp": 2}, overrides=RANGED, plugins=TWINS)
    found = failures(t for t in trials(case) if t.label == "monitors_see_gradients")
    assert "norms of step 1 are right" in str(found["monitors_see_gradients"])


def test_a_router_that_counts_by_itself_is_told_what_to_do():
    case = Case("model", use="counts_twice", plugins=TWINS)
    ((_, error),) = failures(
        t for t in trials(case) if t.label == "activation_checkpointing_is_exact"
    ).items()
    assert "return the load in Routing and add it in the part" in str(error)


@pytest.mark.full
@pytest.mark.parametrize(("use", "faults"), [("sliced", set()), ("adds_every_bias", {MORE_LAYERS})])
def test_tensor_parallelism_fails_exactly_the_checks_meant_for_its_fault(use, faults):
    test_a_fault_fails_exactly_the_checks_meant_for_it(
        Case("parallel", use=use, topology={"tp": 2}, plugins=TWINS), faults
    )


def test_an_undocumented_field_and_a_missing_summary_are_found(tmp_path):
    plugin = tmp_path / "careless.py"
    plugin.write_text(
        "import attrs\n"
        "from nanotrain_core import hookimpl\n"
        "from nanotrain_core.component import Component\n"
        "@attrs.define(frozen=True, kw_only=True)\n"
        "class Config:\n"
        "    size: int = 1\n"
        "@hookimpl\n"
        "def nanotrain_register_monitor(register):\n"
        "    register(Component(name='careless', config=Config, factory='nanotrain_core:x'))\n"
        "    register(Component(name='wrong', config=Config, factory='nanotrain_core:hookimpl',\n"
        "        summary='s', example={'sizes': 2}))\n"
    )
    case = Case("monitor", use="careless", plugins=[plugin])
    found = failures(t for t in trials(case) if t.check.kind == "every")
    assert set(found) == {
        "describes_itself",
        "factory_can_be_imported",
        "config_is_frozen_and_documented",
    }
    wrong = (t for t in trials(attrs.evolve(case, use="wrong")) if t.label == "describes_itself")
    assert "example: monitor.sizes: unknown key" in str(failures(wrong)["describes_itself"])


def test_a_case_that_makes_no_recipe_is_told_once_with_what_to_change():
    case = Case("optimizer", use="sgd", overrides={"batch": {"sequences": 0}})
    ((label, error),) = failures(trials(case)).items()
    assert label == "makes_a_recipe"
    lines = str(error).splitlines()
    assert lines[0] == "the recipe of case sgd-w1 is refused"
    assert lines[1].startswith("batch.sequences: ")
    assert (
        lines[2]
        == "to change the recipe around the component: Case(..., overrides={...}), or --with KEY=VALUE"
    )


def test_a_case_may_have_a_name_and_a_place_among_others():
    first = {"parallel": [{"use": "changes_nothing"}, {"use": "summed"}]}
    case = Case("parallel", use="changes_nothing", overrides=first, plugins=TWINS, name="before")
    assert case.id == "before"
    assert [s.use for s in case.recipe().parallel] == ["changes_nothing", "summed"]
    last = attrs.evolve(case, overrides={"parallel": [{"use": "summed"}]})
    assert [s.use for s in last.recipe().parallel] == ["summed", "changes_nothing"]


def test_an_expected_failure_that_names_no_check_is_refused():
    with pytest.raises(ValueError, match=r"no check is named 'weights_equal' \(did you mean 'weights_equal"):
        conformance(
            Case("parallel", use="summed", plugins=TWINS), expected_failures={"weights_equal": "a reason"}
        )
    with pytest.raises(ValueError, match=r"^marks: no check is named 'weight_equal\[adamw\]'"):
        conformance(
            Case("parallel", use="summed", plugins=TWINS), marks={"weight_equal[adamw]": pytest.mark.full}
        )


@pytest.mark.full
def test_an_expected_failure_is_strict(pytester_file):
    code = (
        "from nanotrain_core.testing import Case, conformance\n"
        "test_conformance = conformance(\n"
        "    Case('schedule', use='accumulate'),\n"
        "    expected_failures={'parts_cover_the_layers': 'it does not fail'})\n"
    )
    output = pytester_file(code, "-k", "parts_cover_the_layers")
    assert "accumulate-w1-parts_cover_the_layers" in output
    assert "XPASS(strict)" in output


@pytest.fixture
def pytester_file(tmp_path):
    """Run pytest in a process of its own on a file with the given text and return its output."""
    import subprocess
    import sys

    def run(text, *options):
        file = tmp_path / "test_example.py"
        file.write_text(text)
        command = [sys.executable, "-m", "pytest", "-rA", str(file), "-p", "no:cacheprovider", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    return run
