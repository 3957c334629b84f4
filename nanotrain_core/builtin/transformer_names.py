"""What transformers calls the parameters and options of GPT-2 and Llama. Never imports torch.

Llama's RoPE pairs number i of a head with number i + K/2, K its size, as ours does. GPT-2 stores the matrix
of a linear layer [in, out], and those of queries, keys and values as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.builtin.configs import TransformerConfig
from nanotrain_core.foreign import Counterpart, Foreign, ForeignError, need, want
from nanotrain_core.foreign_rope import need_number, read_rope, write_rope

#: The options in which the two differ, as :class:`TransformerConfig` calls them.
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu"}
GPT2: dict[str, Any] = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}

#: What transformers calls GELU's tanh form.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


class TransformerNames:
    """See :class:`~nanotrain_core.foreign.ForeignModel`."""

    model_types = ("llama", "gpt2")
    #: Rotary frequencies of old Llama files, and GPT-2's causal masks.
    ignored = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    def table(self, foreign: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table; dropout is left out, since there is none here."""
        return _llama_table(foreign) if foreign["model_type"] == "llama" else _gpt2_table(foreign)

    def config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return a ``config.json``."""
        return _gpt2_config(config) if is_gpt2(config) else _llama_config(config)

    def counterparts(self, config: TransformerConfig) -> Iterator[Counterpart]:
        """Yield every parameter, layer by layer."""
        return _gpt2_names(config) if is_gpt2(config) else _llama_names(config)


def is_gpt2(config: TransformerConfig) -> bool:
    """Say whether a model is a GPT-2, and not a Llama.

    Raises:
        ForeignError: it is neither.
    """
    for options in (GPT2, LLAMA):
        if all(getattr(config, key) == value for key, value in options.items()):
            return options is GPT2
    known = "; ".join(
        f"{name}: " + ", ".join(f"{key} = {value!r}" for key, value in options.items())
        for name, options in {"Llama": LLAMA, "GPT-2": GPT2}.items()
    )
    ours = ", ".join(f"{key} = {getattr(config, key)!r}" for key in GPT2)
    raise ForeignError(f"it is neither of these: {known}; it has {ours}")


def _shared_table(foreign: Mapping[str, Any], width: int, heads: int) -> dict[str, Any]:
    if width % heads:
        raise ForeignError(f"config.json: {heads} heads do not divide width {width}")
    vocab, init_std = need(foreign, "vocab_size"), float(foreign.get("initializer_range", 0.02))
    return {"width": width, "heads": heads, "vocab": vocab, "init_std": init_std}


# --- Llama ------------------------------------------------------------------------------------


#: Options of Llama 3.1's scaled frequencies that have the same names here.
_SCALING = ("factor", "low_freq_factor", "high_freq_factor")


def _llama_table(foreign: Mapping[str, Any]) -> dict[str, Any]:
    want(foreign, "hidden_act", "silu", "swish")
    width, heads = need(foreign, "hidden_size"), need(foreign, "num_attention_heads")
    table = {
        "layers": need(foreign, "num_hidden_layers"),
        **_shared_table(foreign, width, heads),
        **LLAMA,
        "ffn": need(foreign, "intermediate_size"),
        "max_length": foreign.get("max_position_embeddings") or 0,
        **_rope(foreign),
        "norm_eps": float(foreign.get("rms_norm_eps", 1e-6)),
        "bias": _llama_bias(foreign),
        "tied": bool(foreign.get("tie_word_embeddings", False)),
    }
    kv_heads, head_size = foreign.get("num_key_value_heads"), foreign.get("head_dim")
    if kv_heads and kv_heads != heads:
        table["kv_heads"] = kv_heads
    if head_size and head_size != width // heads:
        table["head_size"] = head_size
    return table


def _rope(foreign: Mapping[str, Any]) -> dict[str, Any]:
    theta, kind, options = read_rope(foreign, "llama3")
    if kind == "default":
        return {"rope_theta": theta}
    scaling = {name: need_number(options, name) for name in _SCALING}
    length = need(options, "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": {**scaling, "original_length": length}}


def _rope_options(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return write_rope(config.rope_theta)
    options = {name: getattr(scaling, name) for name in _SCALING}
    options["original_max_position_embeddings"] = scaling.original_length
    return write_rope(config.rope_theta, "llama3", options)


def _llama_bias(foreign: Mapping[str, Any]) -> bool:
    attention, mlp = (bool(foreign.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise ForeignError(
            f"config.json: attention_bias is {attention} and mlp_bias {mlp}; "
            "only both or neither can be represented"
        )
    return attention


def _llama_config(config: TransformerConfig) -> dict[str, Any]:
    c = config
    if c.width % c.heads:
        raise ForeignError(f"{c.heads} heads do not divide width {c.width}, which its Llama wants")
    result = {
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
        **_rope_options(c),
        "attention_bias": c.bias,
        "mlp_bias": c.bias,
        "attention_dropout": 0.0,
        **_shared_config(c),
    }
    if c.max_length:
        result["max_position_embeddings"] = c.max_length
    return result


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


def _llama_names(config: TransformerConfig) -> Iterator[Counterpart]:
    yield Counterpart("embed.weight", Foreign("model.embed_tokens.weight"))
    for layer in range(config.layers):
        for ours, theirs in _LLAMA_MODULES.items():
            for kind in ("weight", "bias") if config.bias and not ours.endswith("norm") else ("weight",):
                foreign = Foreign(f"model.layers.{layer}.{theirs}.{kind}")
                yield Counterpart(f"layers.{layer}.{ours}.{kind}", foreign)
    yield Counterpart("norm.weight", Foreign("model.norm.weight"))
    if not config.tied:
        yield Counterpart("head.weight", Foreign("lm_head.weight"))


# --- GPT-2 ------------------------------------------------------------------------------------


def _gpt2_table(foreign: Mapping[str, Any]) -> dict[str, Any]:
    want(foreign, "activation_function", *TANH_GELU)
    want(foreign, "scale_attn_weights", True)
    want(foreign, "scale_attn_by_inverse_layer_idx", False)
    want(foreign, "add_cross_attention", False)
    width = need(foreign, "n_embd")
    return {
        "layers": need(foreign, "n_layer"),
        **_shared_table(foreign, width, need(foreign, "n_head")),
        **GPT2,
        "ffn": foreign.get("n_inner") or 4 * width,
        "max_length": need(foreign, "n_positions"),
        "norm_eps": float(foreign.get("layer_norm_epsilon", 1e-5)),
        "tied": bool(foreign.get("tie_word_embeddings", True)),
    }


def _gpt2_config(config: TransformerConfig) -> dict[str, Any]:
    c = config
    if (c.kv_heads or c.heads) != c.heads or (c.head_size or c.width // c.heads) * c.heads != c.width:
        raise ForeignError(
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


def _gpt2_names(config: TransformerConfig) -> Iterator[Counterpart]:
    yield Counterpart("embed.weight", Foreign("transformer.wte.weight"))
    yield Counterpart("positions.weight", Foreign("transformer.wpe.weight"))
    for layer in range(config.layers):
        for kind in ("weight", "bias"):
            yield from _gpt2_layer(config, layer, kind)
    for kind in ("weight", "bias"):
        yield Counterpart(f"norm.{kind}", Foreign(f"transformer.ln_f.{kind}"))
    if not config.tied:
        yield Counterpart("head.weight", Foreign("lm_head.weight"))


def _gpt2_layer(config: TransformerConfig, layer: int, kind: str) -> Iterator[Counterpart]:
    ours, theirs, exchanged = f"layers.{layer}", f"transformer.h.{layer}", kind == "weight"
    yield Counterpart(f"{ours}.attn_norm.{kind}", Foreign(f"{theirs}.ln_1.{kind}"))
    for number, name in enumerate("qkv"):
        rows = range(number * config.width, (number + 1) * config.width)
        fused = Foreign(f"{theirs}.attn.c_attn.{kind}", exchanged, rows)
        yield Counterpart(f"{ours}.attn.{name}.{kind}", fused)
    yield Counterpart(f"{ours}.attn.o.{kind}", Foreign(f"{theirs}.attn.c_proj.{kind}", exchanged))
    yield Counterpart(f"{ours}.ffn_norm.{kind}", Foreign(f"{theirs}.ln_2.{kind}"))
    yield Counterpart(f"{ours}.ffn.up.{kind}", Foreign(f"{theirs}.mlp.c_fc.{kind}", exchanged))
    yield Counterpart(f"{ours}.ffn.down.{kind}", Foreign(f"{theirs}.mlp.c_proj.{kind}", exchanged))


names = TransformerNames()
