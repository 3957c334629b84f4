"""The parameter names and config options of GPT-2 in transformers. Never imports torch.

It stores the matrix of a linear layer [in, out], and those of queries, keys and values as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.hf.llama import shared_config, shared_table
from nanotrain_core.hf.mapping import (
    HFError,
    HFTensor,
    ParameterMapping,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)

#: The fields of :class:`TransformerConfig` that tell it from a Llama.
GPT2: dict[str, Any] = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}

#: The fields that ``bias = true`` implies, unless a table sets them, and what a GPT-2 does not have.
_IMPLIED = {"attention_bias": True, "output_bias": True, "ffn_bias": True, "qk_norm": False, "window": 0}

#: transformers' name of GELU's tanh form.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def is_gpt2(config: TransformerConfig) -> bool:
    """Return whether a model computes what a GPT-2 does."""
    given = config.resolved()
    return all(getattr(given, key) == value for key, value in (GPT2 | _IMPLIED).items())


_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def gpt2_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``[model]`` table; dropout is omitted, since there is none here."""
    expect(hf, "activation_function", *TANH_GELU)
    expect(hf, "scale_attn_weights", True)
    expect(hf, "scale_attn_by_inverse_layer_idx", False)
    expect(hf, "add_cross_attention", False)
    for alias, key in _ALIASES.items():  # transformers takes the alias if both are there
        expect(hf, alias, expect_size(hf, key))
    width = expect_size(hf, "n_embd")
    return {
        "layers": expect_size(hf, "n_layer"),
        **shared_table(hf, width, expect_size(hf, "n_head")),
        **GPT2,
        "ffn": expect_size(hf, "n_inner") if hf.get("n_inner") else 4 * width,
        "max_length": expect_size(hf, "n_positions"),
        "norm_eps": expect_real(hf, "layer_norm_epsilon", 1e-5),
        "tied": expect_flag(hf, "tie_word_embeddings", default=True),
    }


def gpt2_config(config: TransformerConfig) -> dict[str, Any]:
    """Return a ``config.json``."""
    c = config
    if (c.kv_heads or c.heads) != c.heads or (c.head_size or c.width // c.heads) * c.heads != c.width:
        raise HFError(
            f"its GPT-2 has as many key heads as query heads and heads of size width / heads; this model has "
            f"heads = {c.heads}, kv_heads = {c.kv_heads}, head_size = {c.head_size}, width = {c.width}"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": c.width,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.ffn or 4 * c.width,
        "n_positions": c.max_length,
        "vocab_size": c.vocab,
        "activation_function": TANH_GELU[0],
        "layer_norm_epsilon": c.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **shared_config(c),
    }


def gpt2_mappings(config: TransformerConfig) -> Iterator[ParameterMapping]:
    """Yield every parameter, layer by layer."""
    yield ParameterMapping("embed.weight", HFTensor("transformer.wte.weight"))
    yield ParameterMapping("positions.weight", HFTensor("transformer.wpe.weight"))
    for layer in range(config.layers):
        for kind in ("weight", "bias"):
            yield from _layer(config, layer, kind)
    for kind in ("weight", "bias"):
        yield ParameterMapping(f"norm.{kind}", HFTensor(f"transformer.ln_f.{kind}"))
    if not config.tied:
        yield ParameterMapping("head.weight", HFTensor("lm_head.weight"))


def _layer(config: TransformerConfig, layer: int, kind: str) -> Iterator[ParameterMapping]:
    ours, theirs, exchanged = f"layers.{layer}", f"transformer.h.{layer}", kind == "weight"
    yield ParameterMapping(f"{ours}.attn_norm.{kind}", HFTensor(f"{theirs}.ln_1.{kind}"))
    for number, name in enumerate("qkv"):
        rows = range(number * config.width, (number + 1) * config.width)
        fused = HFTensor(f"{theirs}.attn.c_attn.{kind}", exchanged, rows)
        yield ParameterMapping(f"{ours}.attn.{name}.{kind}", fused)
    yield ParameterMapping(f"{ours}.attn.o.{kind}", HFTensor(f"{theirs}.attn.c_proj.{kind}", exchanged))
    yield ParameterMapping(f"{ours}.ffn_norm.{kind}", HFTensor(f"{theirs}.ln_2.{kind}"))
    yield ParameterMapping(f"{ours}.ffn.up.{kind}", HFTensor(f"{theirs}.mlp.c_fc.{kind}", exchanged))
    yield ParameterMapping(f"{ours}.ffn.down.{kind}", HFTensor(f"{theirs}.mlp.c_proj.{kind}", exchanged))
