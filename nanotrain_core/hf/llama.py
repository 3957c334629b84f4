"""The parameter names and config options of Llama, Mistral and Qwen in transformers. Never imports torch.

Mistral without a sliding window is a Llama, and Ministral is a Mistral in which some layers have no window.
Qwen2 has biases on queries, keys and values alone; Qwen3 has norms of each head's queries and keys. RoPE
pairs element i of a head with element i + K/2, K its size, as ours does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanotrain_core.builtin.transformer_config import TransformerConfig, shortest_pattern
from nanotrain_core.hf.mapping import (
    HFError,
    HFTensor,
    ParameterMapping,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)
from nanotrain_core.hf.rope_scaling import rope_options, rope_table

#: What all of them have, as fields of :class:`TransformerConfig`.
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu"}

#: ``model_type`` -> the class of transformers that an exported model names.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

#: ``model_type`` -> the keys of its ``config.json`` that say which layers have biases.
_BIAS_FLAGS = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "ministral": (),
    "qwen2": (),
    "qwen3": ("attention_bias",),
}

_QWEN = ("qwen2", "qwen3")
FULL, SLIDING = "full_attention", "sliding_attention"

#: ``model_type`` -> head size of a ``config.json`` without ``head_dim``; width / heads for others.
_HEAD_SIZES = {"qwen3": 128}


def llama_table(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``[model]`` table; dropout is omitted, since there is none here."""
    kind = hf["model_type"]
    expect(hf, "hidden_act", "silu", "swish")
    width, heads = expect_size(hf, "hidden_size"), expect_size(hf, "num_attention_heads")
    table = {
        "layers": expect_size(hf, "num_hidden_layers"),
        **shared_table(hf, width, heads),
        **LLAMA,
        "ffn": expect_size(hf, "intermediate_size"),
        **rope_table(hf),
        "norm_eps": expect_real(hf, "rms_norm_eps", 1e-6),
        **_biases(hf),
        **_window(hf),
        "tied": expect_flag(hf, "tie_word_embeddings", default=False),
    }
    if kind == "qwen3":
        table["qk_norm"] = True
    kv_heads, head_size = hf.get("num_key_value_heads"), hf.get("head_dim", _HEAD_SIZES.get(kind))
    if kv_heads and kv_heads != heads:
        table["kv_heads"] = expect_size(hf, "num_key_value_heads")
    if head_size is not None and head_size != width // heads:
        table["head_size"] = expect_size({"head_dim": head_size}, "head_dim")
    return table


def shared_table(hf: Mapping[str, Any], width: int, heads: int) -> dict[str, Any]:
    """Return the keys of ``[model]`` that GPT-2 has too.

    Raises:
        HFError: ``heads`` query heads do not divide ``width``.
    """
    if width % heads:
        raise HFError(f"config.json: {heads} heads do not divide width {width}")
    vocab, init_std = expect_size(hf, "vocab_size"), expect_real(hf, "initializer_range", 0.02)
    return {"width": width, "heads": heads, "vocab": vocab, "init_std": init_std}


def _window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window, and which layers have it.

    Raises:
        HFError: ``layer_types`` has other kinds, or another number of layers, or needs a window.
    """
    kind, layers, window = (
        hf["model_type"],
        expect_size(hf, "num_hidden_layers"),
        hf.get("sliding_window", 4096),
    )
    first = 0.0
    if kind == "llama" or (kind in _QWEN and not expect_flag(hf, "use_sliding_window", default=False)):
        window = None
    elif kind in _QWEN:
        first = expect_real(hf, "max_window_layers", 28)
    plain = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    given = plain if kind == "llama" else hf.get("layer_types") or plain
    kinds = [expect({"layer_types": each}, "layer_types", FULL, SLIDING) for each in given]
    if len(kinds) != layers:
        raise HFError(f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers is {layers}")
    if SLIDING not in kinds:
        return {}
    if window is None:
        off = "use_sliding_window is not true" if kind in _QWEN else "sliding_window is null"
        raise HFError(f"config.json: layer_types has {SLIDING!r}, and {off}")
    pattern = shortest_pattern(kinds)
    table = {"window": expect_size({"sliding_window": window}, "sliding_window")}
    return table if pattern == [SLIDING] else {**table, "layer_types": pattern}


def _biases(hf: Mapping[str, Any]) -> dict[str, bool]:
    kind = hf["model_type"]
    if kind == "qwen2":
        return {"attention_bias": True, "output_bias": False}
    flags = _BIAS_FLAGS[kind]
    attention, mlp = (key in flags and expect_flag(hf, key, default=False) for key in _BIAS_FLAGS["llama"])
    return {"bias": mlp} if attention == mlp else {"attention_bias": attention, "ffn_bias": mlp}


def llama_type(config: TransformerConfig) -> str | None:
    """Return the ``model_type`` of a model that computes this, None: there is none."""
    given = config.resolved()
    if any(getattr(given, key) != value for key, value in LLAMA.items()):
        return None
    attention, output, ffn = given.attention_bias, given.output_bias, given.ffn_bias
    if given.qk_norm:
        return "qwen3" if attention == output and not ffn else None
    if attention == output:
        kinds = {given.type_of(layer) for layer in range(given.layers)}
        if SLIDING not in kinds:
            return "llama"
        if attention or ffn:
            return None
        return "ministral" if FULL in kinds else "mistral"
    return "qwen2" if attention and not ffn else None


def llama_config(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Return a ``config.json``."""
    c = config.resolved()
    if c.width % c.heads:
        raise HFError(f"{c.heads} heads do not divide width {c.width}, which its Llama wants")
    flags = {"attention_bias": c.attention_bias, "mlp_bias": c.ffn_bias}
    return {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "intermediate_size": c.ffn,
        "vocab_size": c.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **rope_options(config),
        **{key: flags[key] for key in _BIAS_FLAGS[model_type]},
        **_window_options(c, model_type),
        "attention_dropout": 0.0,
        **shared_config(config),
    }


def _window_options(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Return the entries of a ``config.json``: older versions of Qwen read how many layers come first."""
    kinds = [config.type_of(layer) for layer in range(config.layers)]
    if SLIDING not in kinds:
        return {}
    options: dict[str, Any] = {"sliding_window": config.window}
    if model_type != "mistral":
        options["layer_types"] = kinds
    if model_type in _QWEN:
        options |= {"use_sliding_window": True, "max_window_layers": kinds.index(SLIDING)}
    return options


def shared_config(config: TransformerConfig) -> dict[str, Any]:
    """Return what GPT-2 has too. The tokens that begin and end a text are the tokenizer's: none are named."""
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {"initializer_range": config.init_std, "tie_word_embeddings": config.tied, **tokens}


_MODULES = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def llama_mappings(config: TransformerConfig) -> Iterator[ParameterMapping]:
    """Yield every parameter, layer by layer."""
    c = config.resolved()
    biased = dict.fromkeys(("attn.q", "attn.k", "attn.v"), c.attention_bias) | {"attn.o": c.output_bias}
    biased |= dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), c.ffn_bias)
    yield ParameterMapping("embed.weight", HFTensor("model.embed_tokens.weight"))
    for layer in range(c.layers):
        for ours, theirs in _MODULES.items():
            if ours in ("attn.q_norm", "attn.k_norm") and not c.qk_norm:
                continue
            for kind in ("weight", "bias") if biased.get(ours) else ("weight",):
                hf = HFTensor(f"model.layers.{layer}.{theirs}.{kind}")
                yield ParameterMapping(f"layers.{layer}.{ours}.{kind}", hf)
    yield ParameterMapping("norm.weight", HFTensor("model.norm.weight"))
    if not c.tied:
        yield ParameterMapping("head.weight", HFTensor("lm_head.weight"))
