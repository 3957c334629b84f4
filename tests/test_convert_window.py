"""Sliding windows of Mistral, Ministral, Qwen2 and Qwen3, in and out: the reference is transformers."""

import json

import pytest
import torch
from hf_models import logits, ministral, mistral, our_logits, qwen2, qwen3, recipe_from
from transformers import AutoModelForCausalLM

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.hf.convert import convert
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing.converted import tensors_at

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 5


def some(first, layers=3):
    return {"use_sliding_window": True, "max_window_layers": first, "num_hidden_layers": layers}


#: A model, what its config has besides the window, and the kinds of its layers here.
MODELS = {
    "mistral": (mistral, {}, ()),
    "ministral": (ministral, {"layer_types": [SLIDING, FULL]}, (SLIDING, FULL)),
    "qwen2-all": (qwen2, some(0), ()),
    "qwen2-last": (qwen2, some(2), (FULL, FULL, SLIDING)),
    "qwen2-types": (qwen2, some(0) | {"layer_types": [SLIDING, FULL, SLIDING]}, (SLIDING, FULL)),
    "qwen3-last": (qwen3, some(1), (FULL, SLIDING, SLIDING)),
    "qwen3-bias": (qwen3, some(0) | {"attention_bias": True}, ()),
}


@pytest.fixture(params=MODELS)
def theirs(request, tmp_path):
    """A random model of transformers, saved in ``theirs`` and converted in ``ours``, and its layers."""
    model, options, kinds = MODELS[request.param]
    saved = model(sliding_window=WINDOW, **options)
    saved.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", load_plugins())
    return saved, kinds


def config_of(path):
    return open_weights(path, load_plugins()).selection.config


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 24])
def test_logits_are_those_of_transformers_within_the_window_and_beyond(theirs, length, tmp_path):
    """In float64, but for the angles, which transformers takes in float32."""
    saved, kinds = theirs
    config = config_of(tmp_path / "ours")
    assert (config.window, config.layer_types) == (WINDOW, kinds)
    found = our_logits(tmp_path / "ours", length, torch.float64)
    torch.testing.assert_close(found, logits(saved.double(), length), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("theirs")
def test_the_window_counts(tmp_path):
    """Else the comparisons of this file would say nothing."""
    before = our_logits(tmp_path / "ours")
    text = (tmp_path / "ours/model.toml").read_text()
    (tmp_path / "ours/model.toml").write_text(text.replace(f"window = {WINDOW}", f"window = {WINDOW + 1}"))
    after = our_logits(tmp_path / "ours")
    assert torch.equal(before[:, :WINDOW], after[:, :WINDOW])
    assert ((before - after)[:, WINDOW + 1 :].abs().amax(dim=-1) > 1e-4).all()


def test_there_and_back_it_is_the_same_model(theirs, tmp_path):
    saved, _ = theirs
    convert(tmp_path / "ours", tmp_path / "there", load_plugins())
    convert(tmp_path / "there", tmp_path / "back", load_plugins())
    for name in ("model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert type(again) is type(saved)
    assert torch.equal(logits(again), logits(saved))


def test_a_mistral_whose_layers_differ_is_the_ministral_that_transformers_makes_of_it(tmp_path):
    """Its ``AutoModelForCausalLM`` does, told by ``layer_types``."""
    saved = ministral(sliding_window=WINDOW, layer_types=[FULL, SLIDING])
    saved.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mistral"}))
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    torch.testing.assert_close(our_logits(tmp_path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model", "options", "window", "layer_types"),
    [
        (mistral, {}, 4096, ()),
        (qwen2, {"use_sliding_window": True, "num_hidden_layers": 29}, 4096, (FULL,) * 28 + (SLIDING,)),
        (qwen3, {"use_sliding_window": True}, 0, ()),
        (qwen2, {"use_sliding_window": False, "max_window_layers": 0}, 0, ()),
        (mistral, {"sliding_window": None}, 0, ()),
    ],
)
def test_what_a_config_leaves_out_is_that_of_its_class(model, options, window, layer_types, tmp_path):
    saved = model(**options)
    saved.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("sliding_window", "max_window_layers", "use_sliding_window", "layer_types"):
        if key not in options:
            config.pop(key, None)
    path.write_text(json.dumps(config))
    found = config_of(tmp_path)
    assert (found.window, found.layer_types) == (window, layer_types)


@pytest.mark.full_cases("mistral", "qwen2-types")
@pytest.mark.usefixtures("theirs")
def test_what_a_run_makes_of_it_is_what_transformers_computes(tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe_from(tmp_path / "theirs"))
    RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / "run").fit()
    convert(tmp_path / "run", tmp_path / "out", load_plugins())
    before, after = tensors_at(tmp_path / "ours"), tensors_at(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").double()
    found = our_logits(tmp_path / "run", dtype=torch.float64)
    torch.testing.assert_close(found, logits(trained), atol=2e-5, rtol=0)
