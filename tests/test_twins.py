"""Every broken twin of ``twins.py`` is caught, and what is unusual and right is not."""

import pytest
import twins

from benchmarks.twins import hunt, table
from nanotrain_core.testing import Case, failures, planned, trials

#: Kinds whose checks for these faults need no ranks.
ON_PAPER = ("topology", "schedule", "data")
EVERY = [(fault, use) for fault in twins.FAULTS for use in fault.twins]


@pytest.mark.parametrize(
    "fault", [f for f in twins.FAULTS if f.kind in ON_PAPER], ids=lambda fault: fault.name
)
def test_a_twin_of_each_class_fails_a_check_meant_for_it(fault):
    listed, _ = planned(Case(fault.kind, use=fault.twins[0], plugins=[fault.path]))
    meant = [trial for trial in listed if trial.check.name in fault.checks]
    assert any(failures([trial]) for trial in meant)


def test_each_class_has_three_twins_at_least():
    assert all(len(fault.twins) >= 3 for fault in twins.FAULTS)
    assert len({use for _, use in EVERY}) == len(EVERY)


def test_the_table_counts_by_class_and_names_the_checks():
    from benchmarks.twins import Caught

    found = [Caught("data", "the epoch is lost", "one", "places[2]"), Caught("data", "it hangs", "two", "")]
    lines = table(found).splitlines()
    assert lines[2] == "| data | the epoch is lost | 1 | 1 | `places` |"
    assert lines[3] == "| data | it hangs | 1 | 0 |  |"
    assert lines[-1] == "| all | | 2 | 1 (50%) | |"


@pytest.mark.full
@pytest.mark.parametrize(("fault", "use"), EVERY, ids=[use for _, use in EVERY])
def test_the_command_without_options_catches_every_twin(fault, use):
    caught = hunt(fault, use, directly=True)
    assert caught.check.partition("[")[0] in fault.checks, caught


def test_sequences_that_are_in_both_splits_by_chance_are_no_fault():
    case = Case("data", use="few_tokens", plugins=[str(twins.HERE / "broken_splits.py")])
    meant = [trial for trial in planned(case)[0] if trial.check.name == "validation_is_never_trained_on"]
    assert len(meant) > 1  # at several lengths
    assert not failures(meant)


@pytest.mark.full
@pytest.mark.parametrize(
    "use",
    ["keeps_norms_wide", "rounds_at_random", "rounds_by_the_step", "scales_by_the_step", "rounds_coarsely"],
)
def test_what_is_unusual_and_right_passes(use):
    path = str(twins.HERE / "legitimate_precisions.py")
    found = failures(t for t in trials(Case("precision", use=use, plugins=[path])) if t.check.kind != "every")
    assert not found, found
