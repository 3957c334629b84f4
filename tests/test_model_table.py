"""Two tables are of one model exactly when the same weights compute the same: the model is the reference."""

from math import log

import attrs
import pytest
import torch

from nanotrain_core.batch import Batch
from nanotrain_core.builtin.transformer_config import RopeScalingConfig, TransformerConfig
from nanotrain_core.errors import CheckpointError
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.model_config import ModelConfig
from nanotrain_core.recipe.model_table import model_table, refuse_other_model, training_keys
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

SIZES = {"layers": 2, "width": 16, "heads": 4, "vocab": 24, "max_length": 12}
BASES = {
    "llama": SIZES,
    "gpt2": {**SIZES, "positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "layernorm": {**SIZES, "norm": "layernorm"},
    "scaled": {**SIZES, "rope_scaling": RopeScalingConfig(original_length=16)},
    "linear": {**SIZES, "rope_scaling": RopeScalingConfig(type="linear", original_length=16)},
    "window": {**SIZES, "window": 4},
    "yarn": {
        **SIZES,
        "rope_scaling": RopeScalingConfig(type="yarn", original_length=24, attention_factor=0.1 * log(8) + 1),
    },
}
#: For every key another value, and what the key means where it is left unset.
OTHERS = {
    "layers": [3],
    "width": [32],
    "heads": [2],
    "kv_heads": [4, 2],
    "head_size": [4, 8],
    "ffn": [64, 48],
    "vocab": [25],
    "positions": ["rope", "learned"],
    "rope_theta": [100.0],
    "rope_scaling": [
        RopeScalingConfig(original_length=24),
        RopeScalingConfig(original_length=16, beta_fast=8.0, truncate=False),  # none of which llama3 reads
        RopeScalingConfig(type="linear"),
        RopeScalingConfig(type="dynamic", original_length=8),
        RopeScalingConfig(type="yarn", original_length=24),
    ],
    "norm": ["rmsnorm", "layernorm"],
    "norm_eps": [0.1],
    "activation": ["swiglu", "gelu"],
    "bias": [True, False],
    "attention_bias": [True, False],
    "output_bias": [True, False],
    "ffn_bias": [True, False],
    "qk_norm": [True],
    "window": [4],
    "layer_types": [("full_attention", "sliding_attention"), ("full_attention",)],
    "tied": [True],
}


def computed(table):
    """Return the shapes of all parameters and the logits, from weights that are functions of their names."""
    part = Transformer(TransformerConfig(**table)).build(Part.whole(table["layers"])).to_empty(device="cpu")
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens = torch.arange(24).view(2, 12) % 24
    shapes = {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
    with torch.no_grad():
        return shapes, part.double()(tokens, Batch(tokens)).value


def refusal(saved, ours):
    try:
        refuse_other_model(model_table(selection(saved)), selection(ours))
    except CheckpointError as error:
        return str(error)
    return ""


def selection(table):
    return Selection("model", "transformer", TransformerConfig(**table))


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in ("llama", "gpt2", "yarn", "window")))
        for name in BASES
    ],
)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in OTHERS.items() for value in values]
)
def test_a_key_counts_where_it_changes_what_weights_compute(base, key, value):
    table = {**BASES[base], key: value}
    (shapes, logits), (other_shapes, others) = computed(BASES[base]), computed(table)
    same = shapes == other_shapes and torch.equal(logits, others)
    for refused in (refusal(table, BASES[base]), refusal(BASES[base], table)):
        assert refused.startswith("" if same else "the checkpoint is of another model: model.")
        assert bool(refused) == (not same), refused


def test_every_key_is_tried():
    keys = {field.name for field in attrs.fields(TransformerConfig)}
    assert keys == OTHERS.keys() | training_keys(selection(SIZES).config)


@pytest.mark.parametrize(
    ("saved", "ours", "text"),
    [
        ({"ffn": 48}, {}, "model.ffn is 48 there and 64 in this recipe"),
        ({}, {"kv_heads": 2}, "model.kv_heads is 4 there and 2 in this recipe"),
        ({}, {"positions": "learned"}, "model.positions is 'rope' there and 'learned' in this recipe"),
        (
            {"rope_scaling": RopeScalingConfig()},
            {"rope_scaling": RopeScalingConfig(factor=4.0)},
            "model.rope_scaling.factor is 8.0 there and 4.0 in this recipe",
        ),
        ({"window": 8}, {}, "model.window is 8 there and 0 in this recipe"),
        ({"window": 8}, {"window": 8, "layers": 3}, "model.layers is 2 there and 3 in this recipe"),
    ],
)
def test_what_differs_is_told_by_name(saved, ours, text):
    assert refusal({**SIZES, **saved}, {**SIZES, **ours}) == f"the checkpoint is of another model: {text}"


def test_a_table_of_another_version_has_its_defaults_and_no_keys_that_are_gone():
    saved, ours = model_table(selection(SIZES)), selection(SIZES)
    del saved["ffn"], saved["tied"]  # a version that had no such keys
    refuse_other_model(saved, ours)
    with pytest.raises(CheckpointError, match=r"does not fit this one: model\.scores: unknown key 'scores'"):
        refuse_other_model({**saved, "scores": 8}, ours)


@attrs.define(frozen=True, kw_only=True)
class PlainConfig(ModelConfig):
    """Of a plugin that does not say which keys are one model."""

    layers: int = 2
    width: int = 0


@attrs.define(frozen=True, kw_only=True)
class OwnConfig(PlainConfig):
    """Of one that does."""

    def canonical(self):
        return {**attrs.asdict(self), "width": self.width or 32}


def test_a_plugin_s_model_says_itself_which_tables_are_one():
    def pair(config):
        return model_table(Selection("model", "mine", config(width=32))), Selection("model", "mine", config())

    refuse_other_model(*pair(OwnConfig))
    with pytest.raises(CheckpointError, match=r"model\.width is 32 there and 0 in this recipe"):
        refuse_other_model(*pair(PlainConfig))
    with pytest.raises(CheckpointError, match=r"model\.use is 'mine' there and 'transformer' in this recipe"):
        refuse_other_model(pair(OwnConfig)[0], selection(SIZES))


def test_a_run_is_resumed_with_what_it_meant_spelled_out(tmp_path):
    def engine(steps, **options):
        tables = {"run": {"steps": steps}, "checkpoint": {"every": 1}, "model": options.pop("model", {})}
        return make_engine(Case("optimizer", use="adamw"), tables, folder=tmp_path, **options)

    first = engine(1)
    first.fit()
    config = first.run.recipe.model.config
    assert not (config.kv_heads and config.ffn and config.head_size)
    spelled = {name: getattr(config.resolved(), name) for name in ("kv_heads", "ffn", "head_size")}
    again = engine(2, resume="latest", model=spelled)
    again.fit()
    assert again.step == 2
