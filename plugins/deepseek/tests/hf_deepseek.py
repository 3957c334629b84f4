"""Small models of transformers' classes for DeepSeek and Mistral 4, on disk, and logits of both sides."""

import pytest
import torch
import transformers

from nanotrain_core.testing.converted import logits_at

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
V2 = {"norm_topk_prob": False}
MISTRAL = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
#: Its class has no plain RoPE, and scales queries by their position unless told not to.
MISTRAL_ROPE = {
    "rope_type": "linear",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.0,
}
LIMITED = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}


def random_weights(model):
    """Give norms and biases values that show whether they are used; the initialization leaves them alike."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "e_score_correction_bias" in name:
                tensor.uniform_(-0.3, 0.3)
            elif "gate.weight" in name:
                tensor.normal_(0.0, 0.2)


VERSIONS = {
    "v3": (3, {**V3, "q_lora_rank": 20}),
    "v3-no-q-latent-tied": (3, {**V3, "q_lora_rank": None, "tie_word_embeddings": True}),
    "v2": (2, {**V2, **LIMITED, "q_lora_rank": 20}),
    "v2-lite": (2, {**V2, "topk_method": "greedy", "q_lora_rank": None}),
    "v2-no-shared-experts": (2, {**V2, "topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 0}),
    "v3-no-shared-experts": (3, {**V3, "q_lora_rank": 20, "n_shared_experts": 0}),
    "v3-halves": (3, {**V3, "q_lora_rank": 20, "rope_interleave": False}),
    "v3-halves-no-q-latent": (3, {**V3, "q_lora_rank": None, "rope_interleave": False}),
    "mistral": ("Mistral4", {**MISTRAL, "q_lora_rank": 20}),
    "mistral-halves": ("Mistral4", {**MISTRAL, "q_lora_rank": None, "rope_interleave": False}),
}
#: The first four with both kinds of RoPE, then Mistral 4, and the others with the one that has more to it.
PAIRS = [
    *(
        pytest.param(v, rope, id=f"{v}-{'yarn' if rope else 'plain'}")
        for v in list(VERSIONS)[:4]
        for rope in (None, YARN)
    ),
    *(pytest.param(v, YARN, id=f"{v}-yarn") for v in list(VERSIONS)[:3:-1]),
    *(pytest.param(v, None, id=f"{v}-plain", marks=pytest.mark.full) for v in list(VERSIONS)[4:]),
]


def theirs(version, folder, rope=None):
    """Save a random model in ``folder`` and return it."""
    number, options = VERSIONS[version]
    name = number if isinstance(number, str) else f"DeepseekV{number}"
    config_class, model_class = (getattr(transformers, name + what) for what in ("Config", "ForCausalLM"))
    if name == "Mistral4":
        rope = MISTRAL_ROPE | (rope or {})
    rope = dict(rope or {"rope_type": "default", "rope_theta": 10000.0})
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **options}, rope_parameters=rope)).eval()
    random_weights(model)
    model.save_pretrained(folder)
    return model


def tokens():
    return torch.randint(SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(1))


def our_logits(path):
    return logits_at(path, tokens())


@torch.no_grad()
def logits(model):
    return model(tokens()).logits
