"""What the harness asks of a parallel wrapper that syncs gradients holds of an optimizer that does."""

import pytest

from nanotrain_core.testing import Case
from nanotrain_core.testing.checks import parallel

CHECKS = [
    (parallel.gradients_equal, "fp64"),
    (parallel.gradients_equal, "fp32"),
    (parallel.a_precision_may_replace_modules,),
    (parallel.nothing_at_degree_one,),
    (parallel.accumulation_changes_nothing,),
    (parallel.collectives_in_one_order,),
    (parallel.unused_parameter_does_not_hang, "nowhere"),
    (parallel.unused_parameter_does_not_hang, "on_one_rank"),
]


def cases():
    """Return every check of both stages and transports; sockets, and what others cover, in the full tier."""
    for stage, kernels in [(2, "auto"), (2, "torch"), (1, "torch")]:
        for number, check in enumerate(CHECKS):
            marks = [pytest.mark.full] if kernels == "torch" and number else []
            transport = "-sockets" if kernels == "torch" else ""
            name = "-".join([f"{stage}{transport}", check[0].__name__, *check[1:]])
            yield pytest.param(stage, kernels, check, id=name, marks=marks)


@pytest.mark.parametrize(("stage", "kernels", "check"), [*cases()])
def test_gradients_are_those_of_one_process(stage, kernels, check):
    function, *variant = check
    config, around = {"bucket_mb": 0.01, "stage": stage, "clip_norm": 0.5}, {"kernels": {"use": kernels}}
    case = Case("optimizer", use="zero12", config=config, topology={"dp": 2}, overrides=around)
    function(case, *variant)
