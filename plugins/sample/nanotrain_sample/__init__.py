"""Writes text with the weights of a run: one prompt after another, token by token.

This is the plugin's face: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, RegisterCommand, hookimpl

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Announce ``nanotrain sample``."""
    register(
        Command(
            name="sample",
            summary="continue prompts with the weights of a run or a checkpoint",
            module="nanotrain_sample.command",
        )
    )
