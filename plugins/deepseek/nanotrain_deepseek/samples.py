"""Tables of two small models, with V3's mechanisms and V2's, to test this package and others."""

from typing import Any

SIZES: dict[str, Any] = {
    "layers": 3,
    "width": 32,
    "vocab": 64,
    "heads": 4,
    "kv_rank": 8,
    "nope_size": 8,
    "rope_size": 4,
    "value_size": 6,
    "ffn": 48,
    "experts": 8,
    "top_k": 3,
    "expert_ffn": 16,
    "groups": 4,
    "group_limit": 2,
    "init_std": 0.2,
}
V3: dict[str, Any] = {
    **SIZES,
    "q_rank": 12,
    "score": "sigmoid",
    "route_scale": 2.5,
    "bias_update_rate": 0.01,
    "seq_balance": 0.01,
    "mtp": 2,
}
V2: dict[str, Any] = {
    **SIZES,
    "shared_experts": 2,
    "score": "softmax",
    "normalize_weights": False,
    "route_scale": 4.0,
    "expert_balance": 0.01,
    "device_balance": 0.02,
    "comm_balance": 0.03,
    "tied": True,
    "yarn": {"original_length": 8},
}
