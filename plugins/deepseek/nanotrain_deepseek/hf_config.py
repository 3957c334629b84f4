"""What Hugging Face calls the options of DeepSeek-V3 and V2. Never imports torch.

Options that its classes ignore, or that only the released code has, are checked too: the same file must
mean the same model everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanotrain_core.hf.mapping import HFError, ParameterMapping, expect, expect_size
from nanotrain_core.hf.rope import read_rope, write_rope
from nanotrain_deepseek.config import DeepSeekConfig, YarnConfig
from nanotrain_deepseek.hf_names import mappings

#: Our sizes and theirs, where both must be given.
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
_V3, _V2 = "deepseek_v3", "deepseek_v2"


class DeepSeekNames:
    """See :class:`~nanotrain_core.hf.mapping.HFMapping`."""

    model_types = (_V3, _V2)
    #: Modules for further tokens have copies of the embedding and the head.
    ignored = (
        r".*\.rotary_emb\.inv_freq",
        r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    )

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table. What balances experts in training is left at its defaults."""
        f, v3 = hf, hf["model_type"] == _V3
        _check_fixed(f, v3=v3)
        table: dict[str, Any] = {ours: expect_size(f, theirs) for ours, theirs in _SIZES.items()}
        table |= {
            "dense_layers": f.get("first_k_dense_replace", 3 if v3 else 0),
            "q_rank": f.get("q_lora_rank", 1536) or 0,
            "shared_experts": f.get("n_shared_experts", 1 if v3 else 2) or 0,
            "score": "sigmoid" if v3 else "softmax",
            "normalise_weights": bool(f.get("norm_topk_prob", v3)),
            "route_scale": float(f.get("routed_scaling_factor", 2.5 if v3 else 1.0)),
            "max_length": f.get("max_position_embeddings") or 0,
            "norm_eps": float(f.get("rms_norm_eps", 1e-6)),
            "tied": bool(f.get("tie_word_embeddings", False)),
            "init_std": float(f.get("initializer_range", 0.02)),
            "mtp": _further(f, table["layers"], tensors),
            **_groups(f, v3=v3),
            **_rope(f),
        }
        return table | ({"mtp_input": "embedding_first"} if table["mtp"] else {})

    def config(self, config: DeepSeekConfig) -> dict[str, Any]:
        """Return a ``config.json``."""
        c, v3 = config, config.score == "sigmoid"
        _check_ours(c)
        found = {theirs: getattr(c, ours) for ours, theirs in _SIZES.items()}
        found |= {
            "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
            "model_type": _V3 if v3 else _V2,
            "num_key_value_heads": c.heads,
            "first_k_dense_replace": c.dense_layers,
            "moe_layer_freq": 1,
            "q_lora_rank": c.q_rank or None,
            "n_shared_experts": c.shared_experts,
            "scoring_func": c.score,
            "topk_method": _method(c),
            "n_group": c.groups,
            "topk_group": c.chosen_groups,
            "norm_topk_prob": c.normalise_weights,
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
            **_rope_options(c),
        }
        length = c.max_length or (round(c.yarn.factor * c.yarn.original_length) if c.yarn else 0)
        return found | ({"max_position_embeddings": length} if length else {})

    def mappings(self, config: DeepSeekConfig) -> Iterator[ParameterMapping]:
        """Yield every parameter, layer by layer."""
        return mappings(config)


def _check_fixed(f: Mapping[str, Any], *, v3: bool) -> None:
    """Refuse options that this model does not have."""
    expect(f, "hidden_act", "silu")
    expect(f, "attention_bias", False)
    expect(f, "mlp_bias", False)
    expect(f, "moe_layer_freq", 1)
    expect(f, "rope_interleave", True)
    expect(f, "num_key_value_heads", expect_size(f, "num_attention_heads"), None)
    expect(f, "scoring_func", "sigmoid" if v3 else "softmax")
    if v3:
        expect(f, "topk_method", "noaux_tc")
    else:
        expect(f, "topk_method", "greedy", "group_limited_greedy")
        expect(f, "norm_topk_prob", False, None)


def _check_ours(c: DeepSeekConfig) -> None:
    """Refuse what Hugging Face's classes compute otherwise."""
    if not c.shared_experts:
        raise HFError("its models have at least 1 shared expert; shared_experts = 0")
    if c.score == "softmax" and c.normalise_weights:
        raise HFError("its V2 does not divide weights by their sum; normalise_weights = true")
    if c.score == "softmax" and c.width % c.heads:
        raise HFError(f"its V2 wants heads that divide the width; {c.heads} do not divide {c.width}")
    if c.score == "sigmoid" and c.experts // c.groups < 2:
        raise HFError(f"its V3 wants groups of at least 2 experts; groups = {c.groups} of {c.experts}")


def _groups(f: Mapping[str, Any], *, v3: bool) -> dict[str, int]:
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
    """Return how many modules for further tokens there are: files may lack what the config promises."""
    promised = f.get("num_nextn_predict_layers", f.get("num_mtp_layers", 0)) or 0
    there = sum(f"model.layers.{layers + depth}.eh_proj.weight" in tensors for depth in range(promised))
    if there not in (0, promised):
        raise HFError(f"config.json: num_nextn_predict_layers is {promised}, but {there} of them are there")
    return there


# --- RoPE -------------------------------------------------------------------------------------


def _rope(f: Mapping[str, Any]) -> dict[str, Any]:
    theta, kind, options = read_rope(f, "yarn")
    if kind == "default":
        return {"rope_theta": theta}
    expect(options, "attention_factor", None)
    expect(options, "truncate", True)
    length = expect_size(options, "original_max_position_embeddings")
    factor = options.get("factor") or expect_size(f, "max_position_embeddings") / length
    mscale, all_dim = options.get("mscale") or 1.0, options.get("mscale_all_dim") or 0.0
    if bool(options.get("mscale")) != bool(all_dim) and (all_dim or mscale != 1.0):
        raise HFError("config.json: mscale and mscale_all_dim must be given both or neither")
    yarn = {
        "factor": float(factor),
        "original_length": length,
        "beta_fast": float(options.get("beta_fast") or 32),
        "beta_slow": float(options.get("beta_slow") or 1),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
    }
    return {"rope_theta": theta, "yarn": yarn}


def _rope_options(c: DeepSeekConfig) -> dict[str, Any]:
    return write_rope(c.rope_theta, "yarn", _yarn_parameters(c.yarn)) if c.yarn else write_rope(c.rope_theta)


def _yarn_parameters(yarn: YarnConfig) -> dict[str, Any]:
    found = {
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.mscale and yarn.mscale_all_dim:
        return found | {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    if yarn.mscale == 1.0:
        return found
    raise HFError(f"its YaRN has no mscale = {yarn.mscale} with mscale_all_dim = {yarn.mscale_all_dim}")


names = DeepSeekNames()
