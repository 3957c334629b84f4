"""The dynamic loss scale, and what keeps low-precision dtypes from going wrong in silence."""

import pytest
import torch
import torch.nn.functional as F

from nanotrain_core.builtin.configs import LARGEST_SCALE, FP16Config
from nanotrain_core.errors import did_you_mean
from nanotrain_core.models.cross_entropy import linear_cross_entropy
from nanotrain_core.precision.loss_scale import DynamicLossScale


def test_the_scale_halves_at_an_overflow_and_doubles_after_quiet_steps():
    scale = DynamicLossScale(1024.0, growth_interval=3)
    seen = []
    for skipped in (False, True, False, False, False, False):
        scale.update(skipped)
        seen.append(scale.value)
    assert seen == [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


def test_a_scale_below_one_never_grows_at_an_overflow():
    scale = DynamicLossScale(0.25, 2000)
    scale.update(skipped=True)
    assert scale.value == 0.25


def test_a_scale_grows_on_after_a_resume_with_a_shorter_interval():
    scale = DynamicLossScale(1024.0, 100)
    scale.load_meta({"value": 1024.0, "good_steps": 500})
    scale.update(skipped=False)
    assert (scale.value, scale.good_steps) == (2048.0, 0)


def test_the_scale_stays_within_bounds():
    scale = DynamicLossScale(2.0**16, growth_interval=1)
    for _ in range(100):
        scale.update(True)
    assert scale.value == 1.0
    for _ in range(100):
        scale.update(False)
    assert scale.value == LARGEST_SCALE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_heads_gradient_is_rounded_only_after_it_is_divided_by_the_tokens(dtype):
    """4096 tokens that agree make a sum beyond float16; their mean is small."""
    tokens = 4096
    hidden = torch.full((tokens, 2), 30.0, dtype=dtype, requires_grad=True)
    weight = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    (linear_cross_entropy(hidden, weight, targets) / tokens).backward()
    expected = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.detach().double() @ expected.T, targets).backward()
    torch.testing.assert_close(weight.grad.double(), expected.grad, rtol=4e-3, atol=0)


@pytest.mark.parametrize("target", [-1, 4])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, torch.tensor([target]))


def test_a_loss_scale_begins_no_higher_than_it_may_grow():
    assert FP16Config(initial_scale=LARGEST_SCALE).initial_scale == LARGEST_SCALE
    with pytest.raises(ValueError, match=r"at most 1\.67772e\+07, got"):
        FP16Config(initial_scale=2 * LARGEST_SCALE)


def test_the_choice_that_begins_with_a_word_is_nearest():
    choices = ["bf16", "fp16", "fp64", "fp4_master", "fp8_hybrid"]
    assert did_you_mean("fp8", choices) == " (did you mean 'fp8_hybrid'?)"
    assert did_you_mean("fp4", choices) == " (did you mean 'fp4_master'?)"
    assert did_you_mean("bf61", choices) == " (did you mean 'bf16'?)"
    assert did_you_mean("quantum", choices) == ""
