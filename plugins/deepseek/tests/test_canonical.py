"""Two tables are of one model exactly when the same weights compute the same: the model is the reference."""

from functools import cache

import attrs
import pytest
import torch
from nanotrain_deepseek.config import DeepSeekConfig, YarnConfig
from nanotrain_deepseek.model import DeepSeek
from nanotrain_deepseek.samples import SIZES

from nanotrain_core.batch import Batch
from nanotrain_core.errors import CheckpointError
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.model_table import model_table, refuse_other_model, training_keys
from nanotrain_core.recipe.tree import Selection

BASES = {
    "v3": {**SIZES, "q_rank": 12, "mtp": 1},
    "v2": {**SIZES, "score": "softmax", "normalize_weights": False, "yarn": YarnConfig(original_length=8)},
    "any-group": {**SIZES, "group_limit": 0},
    "no-experts": {**SIZES, "dense_layers": 3},
    "no-dense-layers": {**SIZES, "dense_layers": 0},
}
#: For every key other values; among them what some bases mean by a key that is left unset.
OTHERS = {
    "layers": [4],
    "dense_layers": [2],
    "width": [48],
    "vocab": [65],
    "heads": [2],
    "q_rank": [0],
    "kv_rank": [6],
    "nope_size": [6],
    "rope_size": [6],
    "value_size": [8],
    "rope_theta": [100.0],
    "yarn": [YarnConfig(original_length=8, mscale=0.5)],
    "ffn": [40],
    "experts": [12],
    "top_k": [2],
    "shared_experts": [0],
    "expert_ffn": [12],
    "groups": [2],
    "group_limit": [0, 3, 4],
    "score": ["sigmoid", "softmax"],
    "normalize_weights": [True, False],
    "route_scale": [2.0],
    "mtp": [0, 1],
    "mtp_input": ["embedding_first"],
    "norm_eps": [0.1],
    "tied": [True],
}


def computed(table):
    """Return the shapes of all parameters and what weights that are functions of their names compute."""
    part = DeepSeek(DeepSeekConfig(**table)).build(Part.whole(table["layers"])).to_empty(device="cpu")
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens = torch.arange(48).view(4, 12) * 7 % 64
    shapes = {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
    part.double()
    with torch.no_grad():
        losses = part.train()(tokens, Batch(tokens, tokens.roll(-1, 1))).losses
        logits = part.eval()(tokens, Batch(tokens)).value
    return shapes, torch.cat((logits.flatten(), *(losses[name].view(1) for name in sorted(losses))))


@cache
def computed_of_base(name):
    return computed(BASES[name])


def selection(table):
    return Selection("model", "deepseek", DeepSeekConfig(**table))


def refused(saved, ours):
    try:
        refuse_other_model(saved, ours)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "base", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("v3", "v2"))) for name in BASES]
)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in OTHERS.items() for value in values]
)
def test_a_key_counts_where_it_changes_what_weights_compute(base, key, value):
    table = {**BASES[base], key: value}
    (shapes, numbers), (other_shapes, others) = computed_of_base(base), computed(table)
    same = shapes == other_shapes and torch.equal(numbers, others)
    refusal = refused(model_table(selection(table)), selection(BASES[base]))
    assert bool(refusal) == (not same), refusal
    assert same or refusal.startswith("the checkpoint is of another model: model.")


def test_every_key_is_tried():
    keys = {field.name for field in attrs.fields(DeepSeekConfig)}
    assert keys == OTHERS.keys() | training_keys(selection(SIZES).config)
