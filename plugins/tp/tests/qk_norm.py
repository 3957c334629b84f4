"""A transformer that normalizes each head's queries and keys: parameters inside the split region."""

from typing import Literal

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.component import Component


@attrs.define(frozen=True, kw_only=True)
class QKNormConfig(TransformerConfig):
    """``[model] use = "qk_norm"``."""

    role: Literal["INNER", "NORM", "none"] = "INNER"
    """Of the norms."""


@hookimpl
def nanotrain_register_model(register):
    """Register it."""
    factory = f"{__name__}:build"
    register(Component(name="qk_norm", config=QKNormConfig, factory=factory, summary="norms inside"))


def build(config):
    """Return the model; only from here on is torch imported."""
    import torch
    from torch import nn

    from nanotrain_core.layout.roles import Role, tag
    from nanotrain_core.models.transformer import Attention, Transformer

    class Normalized(nn.Module):
        """A linear, then a norm of each head."""

        def __init__(self, linear, head_size):
            super().__init__()
            self.linear, self.norm = linear, nn.RMSNorm(head_size)
            if config.role != "none":
                tag(self.norm, Role[config.role])

        def forward(self, x_BSD):
            y = self.linear(x_BSD).unflatten(-1, (-1, self.norm.normalized_shape[0]))
            return self.norm(y).flatten(2)

    class QKNorm(Transformer):
        def build(self, part, *ops):
            built = super().build(part, *ops)
            with torch.device("meta"):
                for attn in (m for m in built.modules() if isinstance(m, Attention)):
                    attn.q, attn.k = (Normalized(each, attn.head_size) for each in (attn.q, attn.k))
            return built

    return QKNorm(config)
