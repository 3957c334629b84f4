"""Corpora of any size: prepared once by many processes, then memory-mapped, blended and shuffled.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, Component, Register, RegisterCommand, hookimpl
from nanotrain_data.config import ChatConfig, ShardsConfig, StreamingConfig

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_data(register: Register) -> None:
    """Register ``shards``, ``streaming`` and ``chat``."""
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
    register(
        Component(
            name="streaming",
            config=StreamingConfig,
            factory="nanotrain_data.streaming:Streaming",
            summary="shards from fsspec URLs (s3://, https://, ...), through a cache of bounded size",
            provides={"changes_length"},
            requires_for=lambda config: ["document_masks"] if config.mask_documents else [],
            survey="nanotrain_data.survey:survey_streaming",
            example_of_text="nanotrain_data.prepare:example_of_streaming",
        )
    )
    register(
        Component(
            name="chat",
            config=ChatConfig,
            factory="nanotrain_data.chat:Chat",
            summary="prepared conversations, with a loss on the assistant's tokens only",
            provides={"changes_length"},
            requires_for=lambda config: ["document_masks"] if config.packed else [],
            survey="nanotrain_data.survey:survey_chat",
            conversations="nanotrain_data.conversations:conversations_beside",
            example_of_text="nanotrain_data.chat_example:example_of_conversations",
        )
    )


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain data``."""
    register(
        Command(
            name="data",
            summary='prepare, inspect and convert corpora for [data] use = "shards" and "chat"',
            module="nanotrain_data.command",
        )
    )
