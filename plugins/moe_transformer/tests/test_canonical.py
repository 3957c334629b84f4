"""Two tables are of one model exactly when the same weights compute the same: the model is the reference."""

from functools import cache

import attrs
import pytest
import torch
from nanotrain_moe_transformer.config import MoETransformerConfig
from nanotrain_moe_transformer.model import MoETransformer
from nanotrain_moe_transformer.samples import MIXTRAL, QWEN2, QWEN3

from nanotrain_core.api import TransformerConfig
from nanotrain_core.batch import Batch
from nanotrain_core.errors import CheckpointError, RecipeError
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.model_table import model_table, refuse_other_model, training_keys
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.testing import Case

BASES = {
    "mixtral": MIXTRAL,
    "qwen3": {**QWEN3, "mlp_only_layers": (0,)},
    "qwen2": QWEN2,
    "no-experts": {**QWEN3, "mlp_only_layers": (0, 1, 2)},
}
#: For every key of experts other values; among them what some bases mean by another key.
OTHERS = {
    "ffn": [40, 128],
    "activation": ["swiglu"],
    "ffn_bias": [True],
    "experts": [12],
    "top_k": [1],
    "expert_ffn": [12],
    "normalize_weights": [False],
    "decoder_sparse_step": [2, 3],
    "shared_expert_ffn": [0, 12],
    "mlp_only_layers": [(), (0,), (1, 0), (0, 2), (0, 1, 2)],
}


def computed(table):
    """Return the shapes of all parameters and what weights that are functions of their names compute."""
    part = MoETransformer(MoETransformerConfig(**table)).build(Part.whole(3)).to_empty(device="cpu").double()
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens = torch.arange(48).view(4, 12) * 7 % 64
    with torch.no_grad():
        logits = part.eval()(tokens, Batch(tokens)).value
    return {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}, logits


@cache
def computed_of_base(name):
    return computed(BASES[name])


def selection(table):
    return Selection("model", "moe_transformer", MoETransformerConfig(**table))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in OTHERS.items() for value in values]
)
def test_a_key_counts_where_it_changes_what_weights_compute(base, key, value):
    table = {**BASES[base], key: value}
    (shapes, numbers), (other_shapes, others) = computed_of_base(base), computed(table)
    same = shapes == other_shapes and torch.equal(numbers, others)
    assert (refused(model_table(selection(table)), selection(BASES[base])) == "") == same


def refused(saved, ours):
    try:
        refuse_other_model(saved, ours)
    except CheckpointError as error:
        return str(error)
    return ""


def test_every_key_of_its_own_is_tried():
    keys = {field.name for field in attrs.fields(MoETransformerConfig)}
    keys -= {field.name for field in attrs.fields(TransformerConfig)}
    assert keys - training_keys(selection(MIXTRAL).config) <= OTHERS.keys()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({**MIXTRAL, "top_k": 9}, "model.top_k: 9 exceeds the 8 experts there are"),
        ({**QWEN3, "mlp_only_layers": [3]}, "model.mlp_only_layers: there is no layer 3: the last of 3 is 2"),
        ({**QWEN3, "mlp_only_layers": [-1]}, "model.mlp_only_layers: expected an integer from 0"),
        ({**MIXTRAL, "kv_heads": 3}, "model.kv_heads: 3 kv_heads do not divide 4 heads"),
        ({**MIXTRAL, "activation": "gelu"}, "model.activation"),
    ],
)
def test_refusals_name_the_key(table, text):
    with pytest.raises(RecipeError, match="refused") as refusal:
        Case("model", use="moe_transformer", config=table).recipe()
    assert text in str(refusal.value)
