"""The harness tells which function of kernels cannot be called as plain PyTorch's is, and what is missing."""

from functools import partial

import pytest

from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.testing.checks.kernels import assert_takes_the_arguments


def test_a_function_without_an_optional_argument_is_named_with_what_is_missing():
    def attention(q, k, v):
        raise AssertionError("it is not called")

    expected = (
        r"^attention\(q, k, v\): .*'(scale|starts_BT|window)'; "
        r"models may call attention\(.*, scale=\.\.\., starts_BT=\.\.\., window=\.\.\.\)$"
    )
    with pytest.raises(AssertionError, match=expected):
        assert_takes_the_arguments("attention", attention, TORCH_OPS.attention)


def test_a_function_that_asks_for_more_is_named():
    def swiglu(gate, up, limit):
        raise AssertionError("it is not called")

    with pytest.raises(AssertionError, match=r"^swiglu\(gate, up, limit\): .*'limit'"):
        assert_takes_the_arguments("swiglu", swiglu, TORCH_OPS.swiglu)


@pytest.mark.parametrize(
    "function",
    [
        partial(TORCH_OPS.linear_cross_entropy, multiple=128),
        lambda *args, **options: None,
        lambda hidden, weight, target, split=None, chunks=None, matmul=None, multiple=1, loss=None: None,
    ],
    ids=["partial", "anything", "names of its own"],
)
def test_other_names_and_defaults_are_the_functions_own(function):
    assert_takes_the_arguments("linear_cross_entropy", function, TORCH_OPS.linear_cross_entropy)
