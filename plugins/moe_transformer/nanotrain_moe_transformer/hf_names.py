"""Hugging Face's options and names of Mixtral, Qwen2-MoE and Qwen3-MoE. Never imports torch.

What is not of experts is that of Mistral, Qwen2 and Qwen3, whose mapping the core has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.api import (
    HFError,
    HFMapping,
    HFTensor,
    ParameterMapping,
    TransformerNames,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)
from nanotrain_moe_transformer.config import MoETransformerConfig

_MIXTRAL, _QWEN2, _QWEN3 = "mixtral", "qwen2_moe", "qwen3_moe"
_CLASSES = {
    _MIXTRAL: "MixtralForCausalLM",
    _QWEN2: "Qwen2MoeForCausalLM",
    _QWEN3: "Qwen3MoeForCausalLM",
}
#: The dense model of the same attention.
_DENSE = {_MIXTRAL: "mistral", _QWEN2: "qwen2", _QWEN3: "qwen3"}
#: Defaults of optional options, where they are not those of the dense model.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _MIXTRAL: {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None},
    _QWEN2: {"num_key_value_heads": 16},
    _QWEN3: {"num_key_value_heads": 4, "attention_bias": False},
}
_QWEN_PRODUCTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
#: Our products and theirs.
_PRODUCTS = {
    _MIXTRAL: {"gate": "w1", "up": "w3", "down": "w2"},
    _QWEN2: _QWEN_PRODUCTS,
    _QWEN3: _QWEN_PRODUCTS,
}
_MODULES = {_MIXTRAL: "block_sparse_moe", _QWEN2: "mlp", _QWEN3: "mlp"}

_FULL, _SLIDING = "full_attention", "sliding_attention"
#: Dense models without biases.
_NO_BIASES = ("llama", "mistral", "ministral")

_dense = TransformerNames()


class MoETransformerNames(HFMapping):
    """See :class:`~nanotrain_core.api.HFMapping`."""

    model_types = (_MIXTRAL, _QWEN2, _QWEN3)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table."""
        kind = hf["model_type"]
        f = _with_defaults(hf, kind)
        table = {
            **_dense.table({**f, "model_type": _DENSE[kind]}, tensors),
            "top_k": expect_size(f, "num_experts_per_tok"),
        }
        if kind == _MIXTRAL:
            # Every layer has experts: none has the width of a dense one.
            del table["ffn"]
            table |= _aux_loss(f, table["top_k"], table["layers"])
            return table | {
                "experts": _experts(f, "num_local_experts", "num_experts"),
                "expert_ffn": expect_size(f, "intermediate_size"),
            }
        if kind == _QWEN2:
            table["attention_bias"] = expect_flag(f, "qkv_bias", default=True)
            table["shared_expert_ffn"] = expect_size(
                {"shared_expert_intermediate_size": 5632, **f}, "shared_expert_intermediate_size"
            )
        step = expect_size({"decoder_sparse_step": 1, **f}, "decoder_sparse_step")
        dense = _dense_layers(f, table["layers"])
        with_experts = {*range(step - 1, table["layers"], step)} - {*dense}
        return (
            table
            | _aux_loss(f, table["top_k"], len(with_experts))
            | {
                "experts": _experts(f, "num_experts", "num_local_experts"),
                "expert_ffn": expect_size(f, "moe_intermediate_size"),
                "normalize_weights": expect_flag(f, "norm_topk_prob", default=False),
                "decoder_sparse_step": step,
                "mlp_only_layers": dense,
            }
        )

    def config(self, config: MoETransformerConfig) -> dict[str, Any]:
        """Return a ``config.json``.

        Raises:
            HFError: transformers has no such model.
        """
        c, kind = config, _kind(config)
        found = _dense.config(c)
        found |= {"architectures": [_CLASSES[kind]], "model_type": kind, "num_experts_per_tok": c.top_k}
        found["router_aux_loss_coef"] = _rounded(c.aux_loss_coeff * c.moe_layers / c.top_k)
        if kind != _QWEN3:
            found = {key: value for key, value in found.items() if key not in ("attention_bias", "mlp_bias")}
        if kind == _MIXTRAL:
            return found | {
                "num_local_experts": c.experts,
                "intermediate_size": c.expert_ffn,
                "sliding_window": found.get("sliding_window"),
            }
        if kind == _QWEN2:
            found |= _window_options(c) | {
                "qkv_bias": bool(c.resolved().attention_bias),
                "shared_expert_intermediate_size": c.shared_expert_ffn,
            }
        return found | {
            "num_experts": c.experts,
            "moe_intermediate_size": c.expert_ffn,
            "norm_topk_prob": c.normalize_weights,
            "decoder_sparse_step": c.decoder_sparse_step,
            "mlp_only_layers": list(c.mlp_only_layers),
        }

    def mappings(self, config: MoETransformerConfig) -> Iterator[ParameterMapping]:
        """Yield every parameter, layer by layer."""
        kind = _kind(config)
        for mapping in _dense.mappings(config):
            number, _, ffn = mapping.name.removeprefix("layers.").partition(".ffn.")
            if not ffn or not config.is_moe(int(number)):
                yield mapping
            elif ffn == "gate.weight":  # in the place of the three of a dense layer
                yield from _experts_of(config, kind, int(number))


def _with_defaults(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    f = {**_DEFAULTS[kind], **hf}
    if kind != _QWEN2:  # a window is that of every layer: their classes read neither
        f |= {"layer_types": None, "max_window_layers": 0}
    elif not f.get("layer_types") and expect_flag(f, "use_sliding_window", default=False):
        most, layers = f.get("max_window_layers", 28), expect_size(f, "num_hidden_layers")
        f["layer_types"] = [_SLIDING if i % 2 == 0 and i < most else _FULL for i in range(layers)]
    if f["num_key_value_heads"] is None:
        f["num_key_value_heads"] = f.get("num_attention_heads")
    if f.get("head_dim") is None:  # the dense Qwen3 has another default
        f["head_dim"] = expect_size(f, "hidden_size") // expect_size(f, "num_attention_heads")
    tables = (f, f.get("rope_parameters"), f.get("rope_scaling"))
    if kind == _MIXTRAL and not any(isinstance(t, Mapping) and "rope_theta" in t for t in tables):
        f["rope_theta"] = 1e6
    return f


def _aux_loss(f: Mapping[str, Any], top_k: int, layers: int) -> dict[str, float]:
    """Return the auxiliary loss's coefficient, if told: at even load theirs is K, ours 1 in each layer."""
    if f.get("router_aux_loss_coef") is None or not layers:
        return {}
    return {"aux_loss_coeff": _rounded(expect_real(f, "router_aux_loss_coef", 0.0) * top_k / layers)}


def _rounded(coefficient: float) -> float:
    """Return it without the last digits, in which a product and a quotient may differ there and back."""
    return float(f"{coefficient:.12g}")


def _window_options(c: MoETransformerConfig) -> dict[str, Any]:
    """Return the entries of Qwen2-MoE's ``config.json``, whose class reads which layers have a window."""
    kinds: list[str] = [c.type_of(layer) for layer in range(c.layers)]
    windowed = _SLIDING in kinds
    found = {"use_sliding_window": windowed, "sliding_window": c.window if windowed else None}
    return found | {"layer_types": kinds, "max_window_layers": kinds.index(_SLIDING) if windowed else 0}


def _experts(f: Mapping[str, Any], key: str, alias: str) -> int:
    """Return the number of experts; transformers takes the alias if both are there."""
    if key not in f and alias in f:
        return expect_size(f, alias)
    experts = expect_size(f, key)
    expect(f, alias, experts)
    return experts


def _dense_layers(f: Mapping[str, Any], layers: int) -> list[int]:
    found = f.get("mlp_only_layers") or []
    if not isinstance(found, list) or not all(type(n) is int for n in found):
        raise HFError(f"config.json: mlp_only_layers is {found!r}; expected a list of layers")
    return [number for number in found if 0 <= number < layers]  # others are ignored by its class


def _kind(c: MoETransformerConfig) -> str:
    """Return the model type that computes the same.

    Raises:
        HFError: there is none.
    """
    dense, biased = _dense.config(c)["model_type"], bool(c.resolved().attention_bias)
    if c.shared_expert_ffn and (dense == "qwen2" or (dense in _NO_BIASES and not biased)):
        return _QWEN2
    if len({c.type_of(layer) for layer in range(c.layers)}) > 1:
        raise HFError("some of its layers have a window; of Mixtral and Qwen3-MoE, all or none have it")
    if dense == "qwen3" and not c.shared_expert_ffn:
        return _QWEN3
    everywhere = c.moe_layers == c.layers
    if dense in _NO_BIASES and not biased and c.normalize_weights and everywhere:
        return _MIXTRAL
    raise HFError(
        "it is neither a Mixtral, without biases, with normalize_weights = True and experts in every layer, "
        "nor a Qwen2-MoE, with shared_expert_ffn and without qk_norm, nor a Qwen3-MoE, with qk_norm = True "
        f"alone; it has attention_bias = {biased}, normalize_weights = {c.normalize_weights}, qk_norm = "
        f"{c.qk_norm}, shared_expert_ffn = {c.shared_expert_ffn}, and experts in {c.moe_layers} of "
        f"{c.layers} layers"
    )


def _experts_of(config: MoETransformerConfig, kind: str, layer: int) -> Iterator[ParameterMapping]:
    ours, theirs = f"layers.{layer}.moe", f"model.layers.{layer}.{_MODULES[kind]}"
    yield ParameterMapping(f"{ours}.router.weight", HFTensor(f"{theirs}.gate.weight"))
    for name, other in _PRODUCTS[kind].items():
        each = [HFTensor(f"{theirs}.experts.{number}.{other}.weight") for number in range(config.experts)]
        yield ParameterMapping(f"{ours}.experts.{name}", tuple(each))
    if not config.shared_expert_ffn:
        return
    for name, other in _PRODUCTS[kind].items():
        shared = HFTensor(f"{theirs}.shared_expert.{other}.weight")
        yield ParameterMapping(f"{ours}.shared.ffn.{name}.weight", shared)
    yield ParameterMapping(f"{ours}.shared.weight_of.weight", HFTensor(f"{theirs}.shared_expert_gate.weight"))


names = MoETransformerNames()
