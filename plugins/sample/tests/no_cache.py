"""The transformer without a cache: what a model is that does not offer one."""

from nanotrain_core import hookimpl
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.component import Component
from nanotrain_core.models.transformer import Transformer


class NoCache(Transformer):
    """Looks at nothing that a batch brings along."""

    caches = False


@hookimpl
def nanotrain_register_model(register):
    register(Component(name="no_cache", config=TransformerConfig, factory=f"{__name__}:NoCache"))
