"""Llamas with stretched RoPE, and with biases in part of them, in and out: the reference is transformers."""

import json

import pytest
import torch
from hf_models import llama, logits, our_logits, recipe_from

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import tensors_at

#: Sequences of 24 tokens are longer.
ORIGINAL = 12
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 100.0, **parameters}, "head_dim": 16}


MODELS = {
    "linear": rope(rope_type="linear", factor=3.0),
    "dynamic": {**rope(rope_type="dynamic", factor=3.0), "max_position_embeddings": ORIGINAL},
    "yarn": rope(**YARN),
    "yarn-mscale": rope(**YARN, mscale=0.7, mscale_all_dim=1.3),
    "yarn-factor": rope(**YARN, attention_factor=0.6, beta_fast=2.0, beta_slow=0.5, truncate=False),
    "attention-bias": {"attention_bias": True, "num_key_value_heads": 2},
    "mlp-bias": {"mlp_bias": True},
}


@pytest.fixture(params=MODELS)
def theirs(request, tmp_path):
    """A random model of transformers, saved in ``theirs`` and converted in ``ours``."""
    model = llama(**MODELS[request.param])
    model.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    return model


@pytest.mark.parametrize("length", [ORIGINAL // 2, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
def test_logits_are_those_of_transformers_within_the_original_length_and_beyond(theirs, length, tmp_path):
    """In float64, but for the angles, which transformers takes in float32."""
    expected = logits(theirs.double(), length)
    assert expected.std() > 0.1
    found = our_logits(tmp_path / "ours", length, torch.float64)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_there_and_back_it_is_the_same_model(theirs, tmp_path):
    registry = load_plugins()
    convert(tmp_path / "ours", tmp_path / "there", registry)
    convert(tmp_path / "there", tmp_path / "back", registry)
    for name in ("model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    again = type(theirs).from_pretrained(tmp_path / "there")
    for length in (ORIGINAL, 2 * ORIGINAL):
        assert torch.equal(logits(again, length), logits(theirs, length))


def test_an_export_means_the_same_to_older_versions(theirs, tmp_path):
    """They read ``rope_theta`` and ``rope_scaling``."""
    convert(tmp_path / "ours", tmp_path / "there", load_plugins())
    path = tmp_path / "there/config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config))
    assert torch.equal(logits(type(theirs).from_pretrained(tmp_path / "there")), logits(theirs))
    ours, there = (open_weights(tmp_path / name, load_plugins()) for name in ("ours", "there"))
    assert there.selection == ours.selection


@pytest.mark.full_cases("mlp-bias", "yarn")
def test_what_a_run_makes_of_it_is_what_transformers_computes(theirs, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe_from(tmp_path / "theirs"))
    RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / "run").fit()
    convert(tmp_path / "run", tmp_path / "out", load_plugins())
    before, after = tensors_at(tmp_path / "ours"), tensors_at(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    trained = type(theirs).from_pretrained(tmp_path / "out")
    for length in (ORIGINAL, 2 * ORIGINAL):
        found = our_logits(tmp_path / "run", length, torch.float64)
        torch.testing.assert_close(found, logits(trained.double(), length), atol=2e-5, rtol=0)
