"""Small models of Qwen3-MoE's and of Mixtral's shape pass the harness."""

import pytest
from nanotrain_moe_transformer.samples import MIXTRAL, QWEN2, QWEN3

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(Case("model", use="moe_transformer", config=QWEN3, name="qwen3"))

OTHERS = {
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "mixtral-tied": {**MIXTRAL, "tied": True},
    "every-second": {**QWEN3, "layers": 4, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "all-dense": {**QWEN3, "mlp_only_layers": [0, 1, 2]},
    "no-balance": {**MIXTRAL, "aux_loss_coeff": 0.0, "normalize_weights": False},
    "gpt": {
        **{**MIXTRAL, "kv_heads": 0, "positions": "learned", "max_length": 64, "norm": "layernorm"},
        **{"bias": True, "mlp_only_layers": [1]},
    },
}

test_exhaustively = pytest.mark.full(
    conformance(*(Case("model", use="moe_transformer", config=c, name=name) for name, c in OTHERS.items()))
)
