"""Small random models of transformers, and what ours computes from their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanotrain_core.testing.converted import logits_at

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 64


def llama(**changes: Any) -> PreTrainedModel:
    """Two layers of width 32, with 4 heads."""
    return _decoder(LlamaForCausalLM, LlamaConfig, changes)


def mistral(**changes: Any) -> PreTrainedModel:
    """The same, and 2 key and value heads."""
    return _decoder(MistralForCausalLM, MistralConfig, {"num_key_value_heads": 2, **changes})


def ministral(**changes: Any) -> PreTrainedModel:
    """The same, and 2 key and value heads; its config has no default of their size."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8}
    return _decoder(MinistralForCausalLM, MinistralConfig, {**sizes, **changes})


def qwen2(**changes: Any) -> PreTrainedModel:
    """The same, and 2 key and value heads."""
    return _decoder(Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2, **changes})


def qwen3(**changes: Any) -> PreTrainedModel:
    """The same, and 2 key and value heads of size 16."""
    return _decoder(Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16, **changes})


def _decoder(
    model: type[PreTrainedModel], config: type[PreTrainedConfig], changes: dict[str, Any]
) -> PreTrainedModel:
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return randomize(model(config(**{**options, **changes})))


def gpt2(**changes: Any) -> PreTrainedModel:
    """Two layers of width 32, with 4 heads."""
    options = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return randomize(GPT2LMHeadModel(GPT2Config(**{**options, **tokens, **changes})))


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every weight anew: norms and biases that start at 1 and 0 would hide that they are mixed up."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def recipe_from(weights: Path | str) -> str:
    """Return a recipe of one step from ``weights``, for the model that was converted into ``ours``."""
    return f"""
extends = "ours/model.toml"
run = {{ steps = 1, device = "cpu", weights = "{weights}" }}
batch = {{ sequences = 2, microbatch = 2, length = 24 }}
evaluation = {{ sequences = 0 }}
optimizer = {{ use = "sgd", lr = 0.1 }}
data = {{ use = "synthetic", vocab = {VOCAB} }}
"""


def tokens(length: int = 24) -> torch.Tensor:
    """Return [3, ``length``] tokens, at most 24."""
    return torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(9))[:, :length]


@torch.no_grad()
def logits(model: PreTrainedModel, length: int = 24) -> torch.Tensor:
    """Return transformers' logits [3, ``length``, V]."""
    return model(tokens(length)).logits


def our_logits(path: Path, length: int = 24, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits [3, ``length``, V] of our own model with the weights at ``path``."""
    return logits_at(path, tokens(length), dtype)
