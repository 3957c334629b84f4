"""The location of each parameter in the Hugging Face format of the released weights. Never imports torch.

The released weights rotate neighboring elements (2i, 2i + 1) of a rotary head, this model (i, i + P/2): a
permutation of rows maps one to the other. Experts are one tensor each there and stacked here.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from nanotrain_core.api import HFTensor, ParameterMapping
from nanotrain_deepseek.config import DeepSeekConfig

#: Names inside a block, ours to theirs; those with a rotary part and the experts are handled below.
_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_PRODUCTS = ("gate", "up", "down")


@attrs.define(frozen=True)
class Storage:
    """The storage format of tensors, where files differ."""

    interleaved: bool = True
    """Whether neighboring elements of a rotary head are rotated together, as in the released weights."""
    stacked: bool = False
    """Whether the experts of a layer are one tensor, [E, gate and up, D], as Mistral 4's are."""


def mappings(config: DeepSeekConfig, storage: Storage) -> Iterator[ParameterMapping]:
    """Yield every parameter of the whole model, layer by layer.

    Modules for further tokens come after the last layer there. Their copies of embedding and head are
    omitted.
    """
    yield ParameterMapping("embed.weight", HFTensor("model.embed_tokens.weight"))
    for number in range(config.layers):
        dense = number < config.dense_layers
        yield from _block(config, storage, f"layers.{number}.", f"model.layers.{number}.", dense=dense)
    yield ParameterMapping("norm.weight", HFTensor("model.norm.weight"))
    if not config.tied:
        yield ParameterMapping("head.weight", HFTensor("lm_head.weight"))
    for depth in range(config.mtp):
        yield from _predictor(config, storage, f"mtp.{depth}.", f"model.layers.{config.layers + depth}.")


def _predictor(
    config: DeepSeekConfig, storage: Storage, ours: str, theirs: str
) -> Iterator[ParameterMapping]:
    """The released weights concatenate the embedding first, the paper the hidden state."""
    width = config.width
    swapped = [*range(width, 2 * width), *range(width)] if config.mtp_input == "hidden_first" else None
    yield ParameterMapping(f"{ours}hidden_norm.weight", HFTensor(f"{theirs}hnorm.weight"))
    yield ParameterMapping(f"{ours}embed_norm.weight", HFTensor(f"{theirs}enorm.weight"))
    yield ParameterMapping(f"{ours}proj.weight", HFTensor(f"{theirs}eh_proj.weight", columns=swapped))
    yield from _block(config, storage, f"{ours}block.", theirs, dense=False)
    yield ParameterMapping(f"{ours}norm.weight", HFTensor(f"{theirs}shared_head.norm.weight"))


def _block(
    config: DeepSeekConfig, storage: Storage, ours: str, theirs: str, *, dense: bool
) -> Iterator[ParameterMapping]:
    for name, other in _ATTENTION.items():
        yield ParameterMapping(ours + name, HFTensor(theirs + other))
    yield from _rotary(config, storage, ours, theirs)
    if dense:
        for name in _PRODUCTS:
            yield ParameterMapping(f"{ours}ffn.{name}.weight", HFTensor(f"{theirs}mlp.{name}_proj.weight"))
    else:
        yield from _experts(config, storage, f"{ours}moe.", f"{theirs}mlp.")


def _rotary(config: DeepSeekConfig, storage: Storage, ours: str, theirs: str) -> Iterator[ParameterMapping]:
    attn, self_attn = f"{ours}attn.", f"{theirs}self_attn."
    turned = _turned if storage.interleaved else lambda *sizes: None
    rows = turned(config.heads, config.nope_size, config.rope_size)
    if config.q_rank:
        yield ParameterMapping(f"{attn}q_a.weight", HFTensor(f"{self_attn}q_a_proj.weight"))
        yield ParameterMapping(f"{attn}q_a_norm.weight", HFTensor(f"{self_attn}q_a_layernorm.weight"))
        yield ParameterMapping(f"{attn}q_b.weight", HFTensor(f"{self_attn}q_b_proj.weight", rows=rows))
    else:
        yield ParameterMapping(f"{attn}q.weight", HFTensor(f"{self_attn}q_proj.weight", rows=rows))
    rows = turned(1, config.kv_rank, config.rope_size)
    yield ParameterMapping(f"{attn}kv_a.weight", HFTensor(f"{self_attn}kv_a_proj_with_mqa.weight", rows=rows))


def _experts(config: DeepSeekConfig, storage: Storage, ours: str, theirs: str) -> Iterator[ParameterMapping]:
    yield ParameterMapping(f"{ours}router.weight", HFTensor(f"{theirs}gate.weight"))
    if config.score == "sigmoid":
        yield ParameterMapping(f"{ours}router.bias", HFTensor(f"{theirs}gate.e_score_correction_bias"))
    width = config.expert_ffn
    stacked = {
        "gate": HFTensor(f"{theirs}experts.gate_up_proj", columns=range(width)),
        "up": HFTensor(f"{theirs}experts.gate_up_proj", columns=range(width, 2 * width)),
        "down": HFTensor(f"{theirs}experts.down_proj"),
    }
    for name in _PRODUCTS:
        each = [HFTensor(f"{theirs}experts.{number}.{name}_proj.weight") for number in range(config.experts)]
        yield ParameterMapping(f"{ours}experts.{name}", stacked[name] if storage.stacked else tuple(each))
        if config.shared_experts:
            shared = HFTensor(f"{theirs}shared_experts.{name}_proj.weight")
            yield ParameterMapping(f"{ours}shared.{name}.weight", shared)


def empty(config: DeepSeekConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the tensors of shared experts where there are none: transformers has them, without elements."""
    for layer in range(config.dense_layers, config.layers + config.mtp) if not config.shared_experts else ():
        for name in _PRODUCTS:
            shape = (config.width, 0) if name == "down" else (0, config.width)
            yield f"model.layers.{layer}.mlp.shared_experts.{name}_proj.weight", shape


def _turned(heads: int, plain: int, rotary: int) -> tuple[int, ...]:
    """Return the row order of heads with ``plain`` elements, then ``rotary`` ones in pairs."""
    size = plain + rotary
    head = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)]
    return tuple(start + row for start in range(0, heads * size, size) for row in head)
