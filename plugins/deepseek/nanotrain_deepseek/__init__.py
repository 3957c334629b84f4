"""DeepSeek-V3 and V2: latent attention, a mixture of experts and multi-token prediction.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Component, Register, experts_captured, hookimpl
from nanotrain_deepseek.config import DeepSeekConfig, check_deepseek
from nanotrain_deepseek.samples import V3

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_model(register: Register) -> None:
    """Register ``deepseek``."""
    register(
        Component(
            name="deepseek",
            config=DeepSeekConfig,
            factory="nanotrain_deepseek.model:DeepSeek",
            summary="DeepSeek-V3 or V2: latent attention, mixture of experts, multi-token prediction",
            provides={"document_masks"},
            cuda_graphs=experts_captured,
            check=check_deepseek,
            example=V3,
            hf="nanotrain_deepseek.hf_config:names",
        )
    )
