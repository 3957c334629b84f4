"""Training over a pipeline whose stages are uneven, or empty, and in half precision, is training."""

import pytest

from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.parallel import assert_same_reports, traces
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import train


def assert_trains_the_same(case, atol):
    """Three steps of a case end with the gradients and losses of one process."""
    ranks = run_ranks(train, case.world_size, case, {})
    (alone,) = traces(case.alone())
    assert_same(whole([trace.gradients for trace in ranks]), whole([alone.gradients]), "gradients", atol=atol)
    for trace in ranks:
        assert_same_reports(trace, alone, atol=atol)


@pytest.mark.parametrize(
    ("use", "pp", "layers"),
    [
        ("1f1b", 3, [0, 3, 0]),
        ("zb_h1", 2, [3, 0]),
        ("interleaved_1f1b", 2, [1, 0, 2, 0]),
        ("dualpipe_v", 2, [0, 3, 0, 0]),
    ],
)
def test_stages_without_layers(use, pp, layers):
    around = {"model": {"layers": sum(layers)}}
    case = Case("schedule", use=use, config={"layers": layers}, topology={"pp": pp}, overrides=around)
    assert_trains_the_same(case, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_weight_gradients_put_off_are_summed_in_the_wider_dtype_as_without_a_pipeline(precision):
    around = {"model": {"layers": 4}, "precision": {"use": precision}}
    case = Case("schedule", use="dualpipe_v", topology={"pp": 2}, overrides=around)
    assert_trains_the_same(case, atol=1e-6)
