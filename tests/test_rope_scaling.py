"""RoPE stretched to longer sequences: frequencies and magnitudes are those of transformers."""

from typing import get_args

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanotrain_core.builtin.transformer_config import RopeScalingConfig
from nanotrain_core.models.rope import SCALINGS, rope_frequencies
from nanotrain_core.recipe.types import field_types

SIZE, THETA, ORIGINAL = 16, 500.0, 64
#: Our options and theirs, where they are not called the same.
CASES = {
    "linear": (RopeScalingConfig(type="linear", factor=3.0), {}),
    "dynamic": (RopeScalingConfig(type="dynamic", factor=3.0, original_length=ORIGINAL), {}),
    "llama3": (
        RopeScalingConfig(type="llama3", original_length=ORIGINAL, low_freq_factor=0.5, high_freq_factor=3.0),
        {"low_freq_factor": 0.5, "high_freq_factor": 3.0},
    ),
    "yarn": (RopeScalingConfig(type="yarn", original_length=ORIGINAL), {}),
    "yarn-ramp": (
        RopeScalingConfig(
            type="yarn", original_length=ORIGINAL, beta_fast=4.0, beta_slow=0.5, truncate=False
        ),
        {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    ),
    "yarn-plain": (
        RopeScalingConfig(type="yarn", original_length=ORIGINAL, attention_factor=0.8),
        {"attention_factor": 0.8},
    ),
    "yarn-short": (
        RopeScalingConfig(type="yarn", original_length=3),
        {"original_max_position_embeddings": 3},
    ),
}


@pytest.mark.parametrize("length", [ORIGINAL // 2, ORIGINAL, ORIGINAL + 1, 5 * ORIGINAL])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_magnitude_are_those_of_transformers(case, length):
    scaling, options = CASES[case]
    given = {"rope_type": scaling.type, "rope_theta": THETA, "factor": scaling.factor}
    if scaling.type in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = ORIGINAL
    config = transformers.LlamaConfig(
        head_dim=SIZE, max_position_embeddings=ORIGINAL, rope_parameters={**given, **options}
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling.type](config, torch.device("cpu"), seq_len=length)
    found = rope_frequencies(SIZE, THETA, scaling, length=length, device=torch.device("cpu"))
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_every_type_that_a_recipe_may_name_has_its_frequencies():
    assert set(get_args(field_types(RopeScalingConfig)["type"])) == SCALINGS.keys()
