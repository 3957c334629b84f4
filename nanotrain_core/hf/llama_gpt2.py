"""The parameter names and config options of GPT-2 and Llama in transformers. Never imports torch.

Llama's RoPE pairs element i of a head with element i + K/2, K its size, as ours does. GPT-2 stores the matrix
of a linear layer [in, out], and those of queries, keys and values as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.hf.mapping import (
    HFError,
    HFMapping,
    HFTensor,
    ParameterMapping,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)
from nanotrain_core.hf.rope_scaling import rope_options, rope_table

#: The options in which the two differ, as fields of :class:`TransformerConfig`.
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu"}
GPT2: dict[str, Any] = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
#: The keys that ``bias = true`` implies, unless a table sets them.
_BIASES = {"attention_bias": True, "ffn_bias": True}

#: transformers' name of GELU's tanh form.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


class TransformerNames(HFMapping):
    """See :class:`~nanotrain_core.hf.mapping.HFMapping`."""

    model_types = ("llama", "gpt2")
    #: Rotary frequencies of old Llama files, and GPT-2's causal masks.
    ignored = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table; dropout is omitted, since there is none here."""
        return _llama_table(hf) if hf["model_type"] == "llama" else _gpt2_table(hf)

    def config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return a ``config.json``."""
        return _gpt2_config(config) if is_gpt2(config) else _llama_config(config)

    def mappings(self, config: TransformerConfig) -> Iterator[ParameterMapping]:
        """Yield every parameter, layer by layer."""
        return _gpt2_names(config) if is_gpt2(config) else _llama_names(config)


def is_gpt2(config: TransformerConfig) -> bool:
    """Return whether a model is a GPT-2, and not a Llama.

    Raises:
        HFError: it is neither.
    """
    given = config.resolved()
    for options in (GPT2 | _BIASES, LLAMA):
        if all(getattr(given, key) == value for key, value in options.items()):
            return options is not LLAMA
    known = "; ".join(
        f"{name}: " + ", ".join(f"{key} = {value!r}" for key, value in options.items())
        for name, options in {"Llama": LLAMA, "GPT-2": GPT2 | _BIASES}.items()
    )
    ours = ", ".join(f"{key} = {getattr(given, key)!r}" for key in GPT2 | _BIASES)
    raise HFError(f"it is neither of these: {known}; it has {ours}")


def _shared_table(hf: Mapping[str, Any], width: int, heads: int) -> dict[str, Any]:
    if width % heads:
        raise HFError(f"config.json: {heads} heads do not divide width {width}")
    vocab, init_std = expect_size(hf, "vocab_size"), expect_real(hf, "initializer_range", 0.02)
    return {"width": width, "heads": heads, "vocab": vocab, "init_std": init_std}


# --- Llama ------------------------------------------------------------------------------------


def _llama_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    expect(hf, "hidden_act", "silu", "swish")
    width, heads = expect_size(hf, "hidden_size"), expect_size(hf, "num_attention_heads")
    table = {
        "layers": expect_size(hf, "num_hidden_layers"),
        **_shared_table(hf, width, heads),
        **LLAMA,
        "ffn": expect_size(hf, "intermediate_size"),
        **rope_table(hf),
        "norm_eps": expect_real(hf, "rms_norm_eps", 1e-6),
        **_llama_bias(hf),
        "tied": expect_flag(hf, "tie_word_embeddings", default=False),
    }
    kv_heads, head_size = hf.get("num_key_value_heads"), hf.get("head_dim")
    if kv_heads and kv_heads != heads:
        table["kv_heads"] = expect_size(hf, "num_key_value_heads")
    if head_size and head_size != width // heads:
        table["head_size"] = expect_size(hf, "head_dim")
    return table


def _llama_bias(hf: Mapping[str, Any]) -> dict[str, bool]:
    attention, mlp = (expect_flag(hf, key, default=False) for key in ("attention_bias", "mlp_bias"))
    return {"bias": mlp} if attention == mlp else {"attention_bias": attention, "ffn_bias": mlp}


def _llama_config(config: TransformerConfig) -> dict[str, Any]:
    c = config
    if c.width % c.heads:
        raise HFError(f"{c.heads} heads do not divide width {c.width}, which its Llama wants")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads or c.heads,
        "head_dim": c.head_size or c.width // c.heads,
        "intermediate_size": c.ffn or 4 * c.width,
        "vocab_size": c.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **rope_options(c),
        "attention_bias": c.resolved().attention_bias,
        "mlp_bias": c.resolved().ffn_bias,
        "attention_dropout": 0.0,
        **_shared_config(c),
    }


def _shared_config(config: TransformerConfig) -> dict[str, Any]:
    """The tokens that begin and end a text are the tokenizer's: none are named."""
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {"initializer_range": config.init_std, "tie_word_embeddings": config.tied, **tokens}


_LLAMA_MODULES = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def _llama_names(config: TransformerConfig) -> Iterator[ParameterMapping]:
    biased = {"attn": config.resolved().attention_bias, "ffn": config.resolved().ffn_bias}
    yield ParameterMapping("embed.weight", HFTensor("model.embed_tokens.weight"))
    for layer in range(config.layers):
        for ours, theirs in _LLAMA_MODULES.items():
            for kind in ("weight", "bias") if biased.get(ours.partition(".")[0]) else ("weight",):
                hf = HFTensor(f"model.layers.{layer}.{theirs}.{kind}")
                yield ParameterMapping(f"layers.{layer}.{ours}.{kind}", hf)
    yield ParameterMapping("norm.weight", HFTensor("model.norm.weight"))
    if not config.tied:
        yield ParameterMapping("head.weight", HFTensor("lm_head.weight"))


# --- GPT-2 ------------------------------------------------------------------------------------


_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _gpt2_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    expect(hf, "activation_function", *TANH_GELU)
    expect(hf, "scale_attn_weights", True)
    expect(hf, "scale_attn_by_inverse_layer_idx", False)
    expect(hf, "add_cross_attention", False)
    for alias, key in _GPT2_ALIASES.items():  # transformers takes the alias if both are there
        expect(hf, alias, expect_size(hf, key))
    width = expect_size(hf, "n_embd")
    return {
        "layers": expect_size(hf, "n_layer"),
        **_shared_table(hf, width, expect_size(hf, "n_head")),
        **GPT2,
        "ffn": expect_size(hf, "n_inner") if hf.get("n_inner") else 4 * width,
        "max_length": expect_size(hf, "n_positions"),
        "norm_eps": expect_real(hf, "layer_norm_epsilon", 1e-5),
        "tied": expect_flag(hf, "tie_word_embeddings", default=True),
    }


def _gpt2_config(config: TransformerConfig) -> dict[str, Any]:
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
        **_shared_config(c),
    }


def _gpt2_names(config: TransformerConfig) -> Iterator[ParameterMapping]:
    yield ParameterMapping("embed.weight", HFTensor("transformer.wte.weight"))
    yield ParameterMapping("positions.weight", HFTensor("transformer.wpe.weight"))
    for layer in range(config.layers):
        for kind in ("weight", "bias"):
            yield from _gpt2_layer(config, layer, kind)
    for kind in ("weight", "bias"):
        yield ParameterMapping(f"norm.{kind}", HFTensor(f"transformer.ln_f.{kind}"))
    if not config.tied:
        yield ParameterMapping("head.weight", HFTensor("lm_head.weight"))


def _gpt2_layer(config: TransformerConfig, layer: int, kind: str) -> Iterator[ParameterMapping]:
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


names = TransformerNames()
