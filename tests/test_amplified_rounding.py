"""A model that amplifies rounding is no fault of a wrapper, and hides none."""

from pathlib import Path

import pytest

from nanotrain_core.testing import Case, failures, trials
from nanotrain_core.testing.checks.parallel import ADAMW, one_process, traces

TWINS = (str(Path(__file__).with_name("broken_twins.py")),)
CHECK = "twenty_steps_are_those_of_one_process"
#: Scores of attention are so large that after 20 steps the last bit of a sum has become 1e-6 of a gradient.
AMPLIFIES = {"model": {"init_std": 2.5}}


def run_check(use):
    case = Case("parallel", use=use, topology={"dp": 2}, overrides=AMPLIFIES, plugins=TWINS)
    return failures(trial for trial in trials(case) if trial.label == CHECK)


@pytest.mark.full
def test_a_right_wrapper_may_differ_by_what_one_process_does():
    case = Case("parallel", use="summed", topology={"dp": 2}, overrides=AMPLIFIES)
    changes = {"optimizer": ADAMW, "run": {"steps": 20}}
    losses = [trace.reports[-1].loss for trace in (traces(case, **changes)[0], one_process(case, **changes))]
    assert abs(losses[0] - losses[1]) > 1e-9  # more than any other model of the harness
    assert not run_check("summed")


@pytest.mark.full
def test_a_forgotten_sum_is_still_found():
    assert run_check("drops_one_sum").keys() == {CHECK}
