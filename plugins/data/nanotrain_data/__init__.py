"""Corpora of any size: prepared once by many processes, then memory-mapped, blended and shuffled.

This is the plugin's face: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, Component, Register, RegisterCommand, hookimpl
from nanotrain_data.config import ShardsConfig

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_data(register: Register) -> None:
    """Announce ``shards``."""
    register(
        Component(
            name="shards",
            config=ShardsConfig,
            factory="nanotrain_data.shards:Shards",
            summary="prepared folders of tokens, memory-mapped, blended by weights",
            provides={"changes_length"},
            requires_for=lambda config: ["document_masks"] if config.mask_documents else [],
            survey="nanotrain_data.survey:survey",
            example_of_text="nanotrain_data.prepare:example_of_text",
        )
    )


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Announce ``nanotrain data``."""
    register(
        Command(
            name="data",
            summary='prepare, inspect and convert corpora for [data] use = "shards"',
            module="nanotrain_data.command",
        )
    )
