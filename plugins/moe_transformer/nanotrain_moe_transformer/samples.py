"""Tables of small models of each shape, to test this package and others."""

from typing import Any

SIZES: dict[str, Any] = {
    "layers": 3,
    "width": 32,
    "vocab": 64,
    "heads": 4,
    "kv_heads": 2,
    "experts": 8,
    "expert_ffn": 16,
    "init_std": 0.2,
    "aux_loss_coeff": 0.01,
}
QWEN3: dict[str, Any] = {
    **SIZES,
    "head_size": 12,
    "qk_norm": True,
    "top_k": 3,
    "mlp_only_layers": [0],
    "ffn": 48,
}
QWEN2: dict[str, Any] = {
    **SIZES,
    "top_k": 3,
    "normalize_weights": False,
    "attention_bias": True,
    "output_bias": False,
    "shared_expert_ffn": 24,
    "decoder_sparse_step": 2,
    "ffn": 48,
}
MIXTRAL: dict[str, Any] = {**SIZES, "top_k": 2}
