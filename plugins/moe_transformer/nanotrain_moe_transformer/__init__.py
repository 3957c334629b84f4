"""Mixtral, Qwen2-MoE and Qwen3-MoE: the core's transformer with routed experts as feed-forward layers.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Component, Register, experts_captured, hookimpl
from nanotrain_moe_transformer.config import MoETransformerConfig, check_moe_transformer
from nanotrain_moe_transformer.samples import QWEN3

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_model(register: Register) -> None:
    """Register ``moe_transformer``."""
    register(
        Component(
            name="moe_transformer",
            config=MoETransformerConfig,
            factory="nanotrain_moe_transformer.model:MoETransformer",
            summary="Mixtral, Qwen2-MoE, Qwen3-MoE: grouped-query attention, softmax-routed experts",
            provides={"document_masks"},
            cuda_graphs=experts_captured,
            check=check_moe_transformer,
            example=QWEN3,
            hf="nanotrain_moe_transformer.hf_names:names",
        )
    )
