"""Where each parameter is in Hugging Face's form of the released weights. Never imports torch.

The released weights turn neighbouring numbers (2i, 2i + 1) of a rotary head, this model (i, i + P/2): an
order of rows says which of theirs stands where in ours. Experts are a tensor each there and stacked here.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from nanotrain_deepseek.config import DeepSeekConfig

#: Names inside a block, ours to theirs; those with a rotary part and the experts are told apart below.
_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_PRODUCTS = ("gate", "up", "down")


@attrs.define(frozen=True)
class Released:
    """The tensors that make up one of our parameters."""

    names: tuple[str, ...]
    """One name, or with ``stacked`` one for each index of our axis 0."""
    stacked: bool = False
    rows: tuple[int, ...] | None = None
    """Our row i is their row ``rows[i]``; None: the same order."""
    halves_swapped: bool = False
    """The two halves of their columns stand the other way round in ours."""


def released_names(config: DeepSeekConfig) -> dict[str, Released]:
    """Return, for every parameter of the whole model, where it is in the released weights.

    Modules for further tokens follow the last layer there; their copies of embedding and head are left out.
    """
    found = {"embed.weight": Released(("model.embed_tokens.weight",))}
    for number in range(config.layers):
        dense = number < config.dense_layers
        found |= _block(config, f"layers.{number}.", f"model.layers.{number}.", dense=dense)
    found["norm.weight"] = Released(("model.norm.weight",))
    if not config.tied:
        found["head.weight"] = Released(("lm_head.weight",))
    for depth in range(config.mtp):
        found |= _predictor(config, f"mtp.{depth}.", f"model.layers.{config.layers + depth}.")
    return found


def _predictor(config: DeepSeekConfig, ours: str, theirs: str) -> dict[str, Released]:
    swapped = config.mtp_input == "hidden_first"
    return {
        f"{ours}hidden_norm.weight": Released((f"{theirs}hnorm.weight",)),
        f"{ours}embed_norm.weight": Released((f"{theirs}enorm.weight",)),
        f"{ours}proj.weight": Released((f"{theirs}eh_proj.weight",), halves_swapped=swapped),
        **_block(config, f"{ours}block.", theirs, dense=False),
        f"{ours}norm.weight": Released((f"{theirs}shared_head.norm.weight",)),
    }


def _block(config: DeepSeekConfig, ours: str, theirs: str, *, dense: bool) -> dict[str, Released]:
    names = {**dict(_attention(config)), **dict(_dense() if dense else _experts(config))}
    return {
        ours + name: attrs.evolve(found, names=tuple(theirs + other for other in found.names))
        for name, found in names.items()
    }


def _attention(config: DeepSeekConfig) -> Iterator[tuple[str, Released]]:
    for name, other in _ATTENTION.items():
        yield name, Released((other,))
    rows = _turned(config.heads, config.nope_size, config.rope_size)
    if config.q_rank:
        yield "attn.q_a.weight", Released(("self_attn.q_a_proj.weight",))
        yield "attn.q_a_norm.weight", Released(("self_attn.q_a_layernorm.weight",))
        yield "attn.q_b.weight", Released(("self_attn.q_b_proj.weight",), rows=rows)
    else:
        yield "attn.q.weight", Released(("self_attn.q_proj.weight",), rows=rows)
    rows = _turned(1, config.kv_rank, config.rope_size)
    yield "attn.kv_a.weight", Released(("self_attn.kv_a_proj_with_mqa.weight",), rows=rows)


def _dense() -> Iterator[tuple[str, Released]]:
    for name in _PRODUCTS:
        yield f"ffn.{name}.weight", Released((f"mlp.{name}_proj.weight",))


def _experts(config: DeepSeekConfig) -> Iterator[tuple[str, Released]]:
    yield "moe.router.weight", Released(("mlp.gate.weight",))
    if config.score == "sigmoid":
        yield "moe.router.bias", Released(("mlp.gate.e_score_correction_bias",))
    for name in _PRODUCTS:
        each = tuple(f"mlp.experts.{number}.{name}_proj.weight" for number in range(config.experts))
        yield f"moe.experts.{name}", Released(each, stacked=True)
        if config.shared_experts:
            yield f"moe.shared.{name}.weight", Released((f"mlp.shared_experts.{name}_proj.weight",))


def _turned(heads: int, plain: int, rotary: int) -> tuple[int, ...]:
    """Return the order of rows of heads that are ``plain`` numbers, then ``rotary`` ones in pairs."""
    size = plain + rotary
    head = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)]
    return tuple(start + row for start in range(0, heads * size, size) for row in head)
