"""Logits are those of Hugging Face's own implementations, given the same random weights in their form."""

import pytest
import torch
from nanotrain_deepseek.config import DeepSeekConfig, YarnConfig
from nanotrain_deepseek.hf_names import released_names
from nanotrain_deepseek.model import DeepSeek
from safetensors.torch import load_file

from nanotrain_core.actions import Part
from nanotrain_core.batch import Batch

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
LIMITED = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}


def ours(theirs, *, score):
    """Return the config of the model that a Hugging Face config describes."""
    rope = theirs.rope_parameters
    limited = score == "sigmoid" or theirs.topk_method == "group_limited_greedy"
    yarn = None
    if rope["rope_type"] == "yarn":
        yarn = YarnConfig(
            factor=rope["factor"],
            original_length=rope["original_max_position_embeddings"],
            beta_fast=rope["beta_fast"],
            beta_slow=rope["beta_slow"],
            mscale=rope["mscale"],
            mscale_all_dim=rope["mscale_all_dim"],
        )
    return DeepSeekConfig(
        layers=theirs.num_hidden_layers,
        dense_layers=theirs.first_k_dense_replace,
        width=theirs.hidden_size,
        vocab=theirs.vocab_size,
        heads=theirs.num_attention_heads,
        q_rank=theirs.q_lora_rank or 0,
        kv_rank=theirs.kv_lora_rank,
        nope_size=theirs.qk_nope_head_dim,
        rope_size=theirs.qk_rope_head_dim,
        value_size=theirs.v_head_dim,
        rope_theta=rope["rope_theta"],
        yarn=yarn,
        ffn=theirs.intermediate_size,
        experts=theirs.n_routed_experts,
        top_k=theirs.num_experts_per_tok,
        shared_experts=theirs.n_shared_experts,
        expert_ffn=theirs.moe_intermediate_size,
        groups=theirs.n_group if limited else 1,
        group_limit=theirs.topk_group if limited else 0,
        score=score,
        normalise_weights=theirs.norm_topk_prob,
        route_scale=theirs.routed_scaling_factor,
        norm_eps=theirs.rms_norm_eps,
        tied=theirs.tie_word_embeddings,
    )


def load(config, saved):
    """Build our model with released weights, and return it with the names it did not ask for."""
    part = DeepSeek(config).build(Part.whole(config.layers)).to_empty(device="cpu")
    state, wanted = {}, set()
    for name, released in released_names(config).items():
        tensors = [saved[other] for other in released.names]
        tensor = torch.stack(tensors) if released.stacked else tensors[0]
        state[name] = tensor if released.rows is None else tensor[list(released.rows)]
        wanted.update(released.names)
    part.load_state_dict(state, strict=True)
    return part.eval(), saved.keys() - wanted


def random_weights(model):
    """Give norms and biases values that show whether they are used; the initialisation leaves them alike."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "e_score_correction_bias" in name:
                tensor.uniform_(-0.3, 0.3)
            elif "gate.weight" in name:
                tensor.normal_(0.0, 0.2)


@pytest.mark.parametrize("yarn", [False, True], ids=["rope", "yarn"])
@pytest.mark.parametrize(
    ("version", "options"),
    [
        (3, {**V3, "q_lora_rank": 20}),
        (3, {**V3, "q_lora_rank": None, "tie_word_embeddings": True}),
        (2, {**V2, **LIMITED, "q_lora_rank": 20}),
        (2, {**V2, "topk_method": "greedy", "q_lora_rank": None}),
    ],
    ids=["v3", "v3-no-q-latent-tied", "v2", "v2-lite"],
)
def test_logits_are_those_of_transformers(version, options, yarn, tmp_path):
    import transformers

    config_class = getattr(transformers, f"DeepseekV{version}Config")
    model_class = getattr(transformers, f"DeepseekV{version}ForCausalLM")
    rope = YARN if yarn else {"rope_type": "default", "rope_theta": 10000.0}
    theirs = config_class(**SIZES, **options, rope_parameters=rope)
    torch.manual_seed(0)
    model = model_class(theirs).eval()
    random_weights(model)
    model.save_pretrained(tmp_path)
    config = ours(theirs, score="sigmoid" if version == 3 else "softmax")
    part, unused = load(config, load_file(tmp_path / "model.safetensors"))
    assert not unused

    tokens = torch.randint(SIZES["vocab_size"], (3, 40))
    with torch.no_grad():
        expected = model(tokens).logits
        actual = part(tokens, Batch(tokens)).value
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() < 1e-4
