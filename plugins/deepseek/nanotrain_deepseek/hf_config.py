"""Hugging Face's config options of DeepSeek-V3 and V2, and of Mistral 4. Never imports torch.

Options that its classes ignore, or that only the released code has, are checked too: the same file must
mean the same model everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.api import (
    HFError,
    HFMapping,
    ParameterMapping,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.hf_names import Storage, empty, mappings
from nanotrain_deepseek.hf_rope import rope_options, rope_table

#: Our sizes and the corresponding options, where both are required.
_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_rank": "kv_lora_rank",
    "nope_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
    "ffn": "intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
_V3, _V2, _MISTRAL = "deepseek_v3", "deepseek_v2", "mistral4"
_CLASSES = {
    _V3: "DeepseekV3ForCausalLM",
    _V2: "DeepseekV2ForCausalLM",
    _MISTRAL: "Mistral4ForCausalLM",
}
#: Defaults of optional options, where they differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V3: {"dense": 3, "shared": 1, "normalized": True, "scale": 2.5, "q_rank": 1536},
    _V2: {"dense": 0, "shared": 2, "normalized": False, "scale": 1.0, "q_rank": 1536},
    _MISTRAL: {"dense": 0, "shared": 1, "normalized": True, "scale": 1.0, "q_rank": 1024},
}
#: Epsilon of both latents' norms in every class of transformers, whatever ``rms_norm_eps`` is.
_LATENT_EPS = 1e-6


class DeepSeekNames(HFMapping):
    """See :class:`~nanotrain_core.hf.mapping.HFMapping`."""

    model_types = (_V3, _V2, _MISTRAL)
    #: Modules for further tokens have copies of the embedding and the head.
    ignored = (
        r".*\.rotary_emb\.inv_freq",
        r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    )

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table. Options for balancing experts in training keep their defaults."""
        f, kind = hf, hf["model_type"]
        default, v3 = _DEFAULTS[kind], kind == _V3
        _check_fixed(f, kind)
        table: dict[str, Any] = {ours: expect_size(f, theirs) for ours, theirs in _SIZES.items()}
        table |= {
            "dense_layers": f.get("first_k_dense_replace", default["dense"]),
            "q_rank": f.get("q_lora_rank", default["q_rank"]) or 0,
            "shared_experts": f.get("n_shared_experts", default["shared"]) or 0,
            "score": "sigmoid" if v3 else "softmax",
            "normalize_weights": expect_flag(f, "norm_topk_prob", default=default["normalized"]),
            "route_scale": expect_real(f, "routed_scaling_factor", default["scale"]),
            "max_length": f.get("max_position_embeddings") or 0,
            "norm_eps": expect_real(f, "rms_norm_eps", 1e-6),
            "tied": expect_flag(f, "tie_word_embeddings", default=False),
            "init_std": expect_real(f, "initializer_range", 0.02),
            "mtp": _further(f, table["layers"], tensors),
            **_groups(f, kind),
            **rope_table(f, mistral=kind == _MISTRAL),
        }
        return table | ({"mtp_input": "embedding_first"} if table["mtp"] else {})

    def config(self, config: DeepSeekConfig) -> dict[str, Any]:
        """Return a ``config.json``."""
        c, kind = config, _kind(config)
        _check_ours(c, kind)
        found = {theirs: getattr(c, ours) for ours, theirs in _SIZES.items()}
        found |= {
            "architectures": [_CLASSES[kind]],
            "model_type": kind,
            "num_key_value_heads": c.heads,
            "first_k_dense_replace": c.dense_layers,
            "moe_layer_freq": 1,
            "q_lora_rank": c.q_rank or None,
            "n_shared_experts": c.shared_experts,
            "scoring_func": c.score,
            "topk_method": _method(c),
            **_written_groups(c, kind),
            # Without MoE layers ours is unused, and may be true where V2's class knows only false.
            "norm_topk_prob": c.normalize_weights and kind != _V2,
            "routed_scaling_factor": c.route_scale,
            "rms_norm_eps": c.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": c.tied,
            "initializer_range": c.init_std,
            "num_nextn_predict_layers": c.mtp,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_interleave": True,
            **rope_options(c, mistral=kind == _MISTRAL),
        }
        length = c.max_length or (round(c.yarn.factor * c.yarn.original_length) if c.yarn else 0)
        return found | ({"max_position_embeddings": length} if length else {})

    def mappings(self, config: DeepSeekConfig) -> Iterator[ParameterMapping]:
        """Yield every parameter, layer by layer."""
        return mappings(config, Storage(stacked=_kind(config) == _MISTRAL))

    def mappings_in(self, config: DeepSeekConfig, hf: Mapping[str, Any]) -> Iterator[ParameterMapping]:
        """Yield the same for files with this ``config.json``."""
        interleaved = expect_flag(hf, "rope_interleave", default=True)
        return mappings(config, Storage(interleaved, stacked=hf["model_type"] == _MISTRAL))

    def empty(self, config: DeepSeekConfig) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield tensors without numbers."""
        return empty(config)


def _kind(c: DeepSeekConfig) -> str:
    """Return the model type that computes the same; V2's class never divides weights by their sum."""
    if c.score == "sigmoid":
        return _V3
    return _MISTRAL if c.normalize_weights and c.moe_layers else _V2


def _check_fixed(f: Mapping[str, Any], kind: str) -> None:
    """Reject options that this model does not support."""
    expect(f, "hidden_act", "silu")
    expect(f, "attention_bias", False)
    expect(f, "mlp_bias", False)
    expect(f, "moe_layer_freq", 1)
    expect(f, "rms_norm_eps", _LATENT_EPS)
    expect(f, "num_key_value_heads", expect_size(f, "num_attention_heads"), None)
    for alias in ("num_local_experts", "num_experts"):  # its classes take the alias if both are there
        expect(f, alias, expect_size(f, "n_routed_experts"))
    expect(f, "scoring_func", "sigmoid" if kind == _V3 else "softmax")
    if kind == _V3:
        expect(f, "topk_method", "noaux_tc")
    elif kind == _V2:
        expect(f, "topk_method", "greedy", "group_limited_greedy")
        expect(f, "norm_topk_prob", False, None)
        expect(f, "rope_interleave", True)  # ignored by its class
    else:
        expect(f, "head_dim", expect_size(f, "qk_nope_head_dim") + expect_size(f, "qk_rope_head_dim"))
        expect(
            {"topk_group": 1, **f}, "topk_group", f.get("n_group", 1)
        )  # with fewer it selects others than this model


def _check_ours(c: DeepSeekConfig, kind: str) -> None:
    """Reject configs that Hugging Face's classes compute differently."""
    if c.norm_eps != _LATENT_EPS:
        raise HFError(f"its norms of latents always add {_LATENT_EPS}; norm_eps = {c.norm_eps}")
    if kind == _MISTRAL and c.chosen_groups < c.groups:
        raise HFError(
            "its V2 does not divide weights by their sum, and its Mistral 4, which does, takes groups by "
            f"their best two experts, not one; normalize_weights = true with group_limit = {c.group_limit}"
        )
    if kind == _V2 and c.width % c.heads:
        raise HFError(f"its V2 wants heads that divide the width; {c.heads} do not divide {c.width}")
    if kind != _V2 and c.moe_layers and c.experts < 2:
        raise HFError("its routers of V3 and Mistral 4 want at least 2 experts; experts = 1")


def _written_groups(c: DeepSeekConfig, kind: str) -> dict[str, int]:
    """Without a limit groups have no effect; V3 and Mistral 4 still require groups of two or more experts."""
    plain = c.chosen_groups == c.groups and (kind == _MISTRAL or c.experts // c.groups < 2)
    return {"n_group": 1, "topk_group": 1} if plain else {"n_group": c.groups, "topk_group": c.chosen_groups}


def _groups(f: Mapping[str, Any], kind: str) -> dict[str, int]:
    v3 = kind == _V3
    groups, chosen = (
        f.get(key, default if v3 else None) for key, default in (("n_group", 8), ("topk_group", 4))
    )
    limited = (v3 or f.get("topk_method") == "group_limited_greedy") and chosen != groups
    return {"groups": groups or 1, "group_limit": (chosen or 0) if limited else 0}


def _method(c: DeepSeekConfig) -> str:
    if c.score == "sigmoid":
        return "noaux_tc"
    return "group_limited_greedy" if c.chosen_groups < c.groups else "greedy"


def _further(f: Mapping[str, Any], layers: int, tensors: Collection[str]) -> int:
    """Return the number of MTP modules in the files, which may lack those that the config lists."""
    key = "num_nextn_predict_layers" if "num_nextn_predict_layers" in f else "num_mtp_layers"
    promised = min(expect_size(f, key), len(tensors) + 1) if f.get(key) else 0
    there = sum(f"model.layers.{layers + depth}.eh_proj.weight" in tensors for depth in range(promised))
    if there not in (0, promised):
        raise HFError(f"config.json: num_nextn_predict_layers is {promised}, but {there} of them are there")
    return there


names = DeepSeekNames()
