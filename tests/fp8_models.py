"""Models that the tests of FP8 train: all widths are whole tiles of 128, unless a test changes them."""

LLAMA = {
    "use": "transformer",
    "layers": 2,
    "width": 128,
    "heads": 4,
    "vocab": 64,
    "ffn": 256,
    "init_std": 0.1,
}
DEEPSEEK = {
    "use": "deepseek",
    "layers": 2,
    "dense_layers": 1,
    "width": 128,
    "heads": 4,
    "vocab": 64,
    "q_rank": 128,
    "kv_rank": 64,
    "nope_size": 64,
    "rope_size": 16,
    "value_size": 64,
    "ffn": 256,
    "experts": 4,
    "top_k": 2,
    "shared_experts": 1,
    "expert_ffn": 256,
    "groups": 2,
    "group_limit": 1,
}
